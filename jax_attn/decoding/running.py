"""Checks of numbers that a compiled function knows only when it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from attn_bridge import validation

from .. import functional


def is_known(*values: Any) -> bool:
    """Tell whether none of the values is one that waits for a compiled function to run."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def raise_unless(holds: Bool[Array, ""], check: Callable[..., None], *values: Any) -> None:
    """Have `check` raise, with the numbers that the values turn out to be, while a compiled function runs.

    The error may come after what was computed, or never if nobody waits for it: that has to be NaN besides.

    Args:
        holds: whether all is well, so that `check` need not be called.
        check: is called with Python's numbers, or lists of them.
        values: what it is called with.
    """

    def refuse(*found: Any) -> None:
        check(*(np.asarray(value).tolist() for value in found))

    jax.lax.cond(holds, lambda: None, functools.partial(jax.debug.callback, refuse, *values))


def known_rows(indices: Int[Array, "B"], rows: int) -> Int[Array, "B"]:
    """Return the indices of rows, checked; ``jnp.take(array, ..., 0, mode="fill")`` gives NaN for no row.

    Raises:
        TypeError: indices that are no integers.
        ValueError: not one index per row, or one of no row, if they are known; else while a compiled function runs.
    """
    shape, dtype = tuple(indices.shape), functional.dtype_name(indices)
    if is_known(indices):
        validation.check_reorder(shape, dtype, rows, np.asarray(indices).tolist())
        return jnp.asarray(indices)
    validation.check_reorder(shape, dtype, rows)
    inside = (indices >= 0) & (indices < rows)
    raise_unless(inside.all(), functools.partial(validation.check_reorder, shape, dtype, rows), indices)
    # A negative one would count from the end.
    return jnp.where(inside, indices, rows)
