"""Products of a few rows of bfloat16 and a matrix, as linear layers have them in decoding, by `attn_kernels`.

XLA's CPU would widen the whole matrix for each of them. Where a program is not for this processor, the rows are many or
the matrix is small, it is `lax.dot_general`; so are derivatives.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attn_kernels import words
from attn_kernels.description import describe_product

from . import cpu_flash
from .flash_primitives import register_target

MIN_BYTES = 2**20
"""Bytes of a matrix from which the kernel is taken: smaller ones stay in the caches, widened or not."""

MULTIPLE = 16
"""It is taken for a multiple of so many columns, which fill registers on every processor."""

_NAME = "attn_bridge_few_rows"


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
    """Return `lax.dot_general` of its arguments."""
    if _pays(lhs, rhs, dimension_numbers) and not args and not any(one is not None for one in options.values()):
        flat: Array = _PRODUCT.bind(lhs.reshape(-1, lhs.shape[-1]), rhs)
        return flat.reshape(*lhs.shape[:-1], rhs.shape[-1])
    return lax.dot_general(lhs, rhs, dimension_numbers, *args, **options)


def _pays(lhs: Array, rhs: Array, dimension_numbers: Any) -> bool:
    if rhs.ndim != 2 or lhs.ndim < 1 or lhs.dtype.name != "bfloat16" or rhs.dtype != lhs.dtype:
        return False
    if dimension_numbers != (((lhs.ndim - 1,), (0,)), ((), ())):
        return False
    if not all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape)):
        return False
    if not 0 < math.prod(lhs.shape[:-1]) <= words.FEW or rhs.size * rhs.dtype.itemsize < MIN_BYTES:
        return False
    if rhs.shape[1] % MULTIPLE or jax.device_count() > 1:
        return False
    return cpu_flash.unavailable() is None


def _plain(rows: Array, matrix: Array) -> Array:
    return lax.dot_general(rows, matrix, (((1,), (0,)), ((), ())))


_PRODUCT = Primitive(_NAME)
_PRODUCT.def_abstract_eval(lambda rows, matrix: rows.update(shape=(rows.shape[0], matrix.shape[1])))


@_PRODUCT.def_impl
@functools.partial(jax.jit)
def _run(rows: Array, matrix: Array) -> Array:
    found: Array = _PRODUCT.bind(rows, matrix)
    return found


_lower_plain = mlir.lower_fun(_plain, multiple_results=False)


def _lower(context: Any, rows: Any, matrix: Any) -> Any:
    if context.module_context.lowering_parameters.for_export:
        return _lower_plain(context, rows, matrix)
    (count, depth), (_, columns) = (one.shape for one in context.avals_in)
    dtype = context.avals_in[0].dtype.name
    register_target(_NAME, lambda xla: xla.few_rows(dtype))
    told = np.asarray(describe_product(dtype, count, depth, columns), np.int64)
    return jax.ffi.ffi_lowering(_NAME)(context, rows, matrix, shape=told)


mlir.register_lowering(_PRODUCT, _lower, platform="cpu")
mlir.register_lowering(_PRODUCT, _lower_plain)
ad.defjvp(
    _PRODUCT,
    lambda tangent, rows, matrix: _plain(tangent, matrix),
    lambda tangent, rows, matrix: _plain(rows, tangent),
)


def _batch(arrays: Any, axes: Any) -> tuple[Array, int]:
    return jax.vmap(_plain, axes)(*arrays), 0


batching.primitive_batchers[_PRODUCT] = _batch
