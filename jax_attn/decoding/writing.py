"""Parts of a cache written in place: numbers of bfloat16 as integers, as XLA's CPU would widen the whole cache else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def put(array: Array, part: Array, start: Any) -> Array:
    """Return an array ``(B, S, ...)`` with other numbers ``(B, T, ...)`` from a slot on."""
    return _as_integers(lambda one, other: lax.dynamic_update_slice_in_dim(one, other, start, 1), array, part)


def put_at(array: Array, part: Array, slots: Array) -> Array:
    """Return an array ``(B, S, ...)`` with other numbers ``(B, T, ...)`` in some slots."""
    return _as_integers(lambda one, other: one.at[:, slots].set(other), array, part)


def _as_integers(write: Callable[[Array, Array], Array], array: Array, part: Array) -> Array:
    part = part.astype(array.dtype)
    if array.dtype != jnp.bfloat16 or array.size == 0:
        return write(array, part)
    found = write(*(lax.bitcast_convert_type(one, jnp.uint16) for one in (array, part)))
    return lax.bitcast_convert_type(found, array.dtype)
