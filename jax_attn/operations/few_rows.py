"""Products of a few rows of bfloat16 and a matrix, as linear layers have them in decoding, by `attn_kernels`.

XLA's CPU would widen the whole matrix for each of them. Where a program is not for this processor, the rows are many or
the matrix is small, it is `lax.dot_general`; so are derivatives.
"""

from __future__ import annotations

import functools
import importlib
import math

import jax
import numpy as np
from jax import Array, lax
from jax.interpreters import mlir

from attn_kernels import words
from attn_kernels.description import describe_product

from ..implementations import cpu_flash
from ..implementations.flash_primitives import register_target
from .replaced import replaced

MIN_BYTES = 2**20
"""Bytes of a matrix from which the kernel is taken: smaller ones stay in the caches, widened or not."""

MULTIPLE = 16
"""The kernel needs a multiple of this many columns, which fill registers on every processor."""

_NAME = "attn_bridge_few_rows"


def dot_general(lhs: Array, rhs: Array, dimension_numbers: object, *args: object, **options: object) -> Array:
    """Return `lax.dot_general` of its arguments."""
    if _pays(lhs, rhs, dimension_numbers) and not args and not any(one is not None for one in options.values()):
        flat: Array = _PRODUCT.bind(lhs.reshape(-1, lhs.shape[-1]), rhs)
        return flat.reshape(*lhs.shape[:-1], rhs.shape[-1])
    return lax.dot_general(lhs, rhs, dimension_numbers, *args, **options)


def _pays(lhs: Array, rhs: Array, dimension_numbers: object) -> bool:
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


def _lower(context: mlir.LoweringRuleContext, rows: object, matrix: object) -> object:
    (count, depth), (_, columns) = (one.shape for one in context.avals_in)
    dtype = context.avals_in[0].dtype.name
    if dtype not in words.KINDS:  # the judge has promoted it
        return None
    register_target(_target(dtype), functools.partial(_compiled, dtype))
    description = np.asarray(describe_product(dtype, count, depth, columns), np.int64)
    return jax.ffi.ffi_lowering(_target(dtype))(context, rows, matrix, shape=description)


def _target(dtype: str) -> str:
    return f"{_NAME}_{dtype}"


def _compiled(dtype: str) -> object:
    return importlib.import_module("attn_kernels.xla.calls").few_rows(dtype)


_PRODUCT = replaced(_NAME, _plain, _lower)
