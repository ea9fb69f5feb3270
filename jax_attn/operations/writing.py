"""Parts of a cache written in place: numbers of bfloat16 as integers, as XLA's CPU would widen the whole cache else."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .replaced import replaced


def put(array: Array, part: Array, start: Array | int) -> Array:
    """Return an array ``(B, S, ...)`` with other numbers ``(B, T, ...)`` from a slot on."""
    return _write(_PUT, _put, array, part, jnp.asarray(start, jnp.int32))


def put_at(array: Array, part: Array, slots: Array) -> Array:
    """Return an array ``(B, S, ...)`` with other numbers ``(B, T, ...)`` in some slots."""
    return _write(_PUT_AT, _put_at, array, part, slots)


def _put(array: Array, part: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(array, part, start, 1)


def _put_at(array: Array, part: Array, slots: Array) -> Array:
    return array.at[:, slots].set(part)


def _write(operation: Primitive, plain: Callable[..., Array], array: Array, part: Array, where: Array) -> Array:
    part = part.astype(array.dtype)
    if array.dtype != jnp.bfloat16 or array.size == 0 or jax.device_count() > 1 or jax.default_backend() != "cpu":
        return plain(array, part, where)
    written: Array = operation.bind(array, part, where)
    return written


def _as_integers(plain: Callable[..., Array]) -> Callable[..., object]:
    """Return the CPU lowering of a writing operation: bfloat16 is written as integers.

    Other dtypes, such as those that the judge promotes to, are lowered as usual (the rule returns None).
    """

    def write(array: Array, part: Array, where: Array) -> Array:
        written = plain(*(lax.bitcast_convert_type(one, jnp.uint16) for one in (array, part)), where)
        return lax.bitcast_convert_type(written, array.dtype)

    lower = mlir.lower_fun(write, multiple_results=False)
    return lambda context, *operands: lower(context, *operands) if context.avals_in[0].dtype == jnp.bfloat16 else None


_PUT = replaced("attn_bridge_put", _put, _as_integers(_put))
_PUT_AT = replaced("attn_bridge_put_at", _put_at, _as_integers(_put_at))
