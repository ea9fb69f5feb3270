"""Operations of a jaxpr in NumPy, by the names of their primitives, with the parameters that JAX gives them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike


def _plain(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Make an operation of a NumPy function of the operands alone."""
    return lambda *operands, **_: function(*operands)


def _special(name: str) -> Callable[..., np.ndarray]:
    """Make an operation of a function of `scipy.special`, which few programs need and which takes long to import."""
    return _plain(lambda *operands: getattr(importlib.import_module("scipy.special"), name)(*operands))


def _divide(dividend: np.ndarray, divisor: np.ndarray, **_: object) -> np.ndarray:
    if dividend.dtype.kind == "f":
        return dividend / divisor
    if dividend.dtype.kind not in "iu" or not divisor.all():
        return NotImplemented
    quotient, rest = np.divmod(dividend, divisor)
    return quotient + ((rest != 0) & ((dividend < 0) != (divisor < 0)))  # towards zero, where NumPy rounds down


def _remainder(dividend: np.ndarray, divisor: np.ndarray, **_: object) -> np.ndarray:
    return (
        np.fmod(dividend, divisor)
        if dividend.dtype.kind == "f" or (dividend.dtype.kind in "iu" and divisor.all())
        else NotImplemented
    )


def _select(which: np.ndarray, *cases: np.ndarray, **_: object) -> np.ndarray:
    if which.dtype == np.bool_:
        return np.where(which, cases[1], cases[0])
    return NotImplemented


def _broadcast_in_dim(
    operand: np.ndarray, *dynamic: object, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: object
) -> np.ndarray:
    if dynamic:
        return NotImplemented
    sizes = [1] * len(shape)
    for axis, dimension in enumerate(broadcast_dimensions):
        sizes[dimension] = operand.shape[axis]
    return np.broadcast_to(operand.reshape(sizes), shape)


def _reshape(
    operand: np.ndarray,
    *dynamic: object,
    new_sizes: Sequence[int],
    dimensions: Sequence[int] | None = None,
    **_: object,
) -> np.ndarray:
    if dynamic:
        return NotImplemented
    return (operand if dimensions is None else operand.transpose(dimensions)).reshape(new_sizes)


def _pad(
    operand: np.ndarray, value: np.ndarray, *, padding_config: Sequence[tuple[int, int, int]], **_: object
) -> np.ndarray:
    if any(low < 0 or high < 0 or inner for low, high, inner in padding_config):
        return NotImplemented
    return np.pad(operand, [(low, high) for low, high, _ in padding_config], constant_values=value)


def _slice(
    operand: np.ndarray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **_: object,
) -> np.ndarray:
    steps = strides or [1] * operand.ndim
    return operand[tuple(map(slice, start_indices, limit_indices, steps))]


def _clamped(starts: Sequence[np.ndarray], sizes: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    begins = [min(max(int(start), 0), whole - size) for start, size, whole in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(begins, sizes, strict=True))


def _dynamic_slice(operand: np.ndarray, *starts: np.ndarray, slice_sizes: Sequence[int], **_: object) -> np.ndarray:
    return operand[_clamped(starts[: operand.ndim], slice_sizes, operand.shape)]


def _dynamic_update_slice(operand: np.ndarray, update: np.ndarray, *starts: np.ndarray, **_: object) -> np.ndarray:
    result = np.array(operand, copy=True)
    result[_clamped(starts, update.shape, operand.shape)] = update
    return result


def _gather(
    operand: np.ndarray,
    indices: np.ndarray,
    *,
    dimension_numbers: jax.lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: jax.lax.GatherScatterMode,
    fill_value: object = None,
    **_: object,
) -> np.ndarray:
    """Return one slice of the operand per row of indices; indices out of bounds are clipped, or give the fill value."""
    numbers = dimension_numbers
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if 0 in operand.shape or mode == jax.lax.GatherScatterMode.ONE_HOT:
        return NotImplemented
    batch = indices.shape[:-1]
    window = [axis for axis in range(operand.ndim) if axis not in (*numbers.collapsed_slice_dims, *batching)]
    shape = (*batch, *[1] * len(window))
    is_inside = np.ones(batch, bool)
    chosen = []
    for axis, size in enumerate(slice_sizes):
        start = np.zeros(batch, np.int64)
        if axis in numbers.start_index_map:
            start = indices[..., numbers.start_index_map.index(axis)].astype(np.int64)
            is_inside &= (start >= 0) & (start <= operand.shape[axis] - size)
            start = np.clip(start, 0, operand.shape[axis] - size)
        elif axis in batching:
            start = np.indices(batch, sparse=True)[batching[axis]] + start
        index = start.reshape(shape)
        if axis in window:
            steps = [1] * len(shape)
            steps[len(batch) + window.index(axis)] = size
            index = index + np.arange(size).reshape(steps)
        chosen.append(index)
    made = operand[tuple(chosen)]
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP and not is_inside.all():
        if operand.dtype.kind != "f":
            return NotImplemented  # what fills depends on the dtype
        filling = np.asarray(np.nan if fill_value is None else fill_value)
        made = np.where(is_inside.reshape(shape), made, filling)
    return np.moveaxis(made, range(len(batch), made.ndim), numbers.offset_dims)


def _iota(*dynamic: object, dtype: DTypeLike, shape: Sequence[int], dimension: int, **_: object) -> np.ndarray:
    if dynamic:
        return NotImplemented
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _convert(operand: np.ndarray, *, new_dtype: DTypeLike, **_: object) -> np.ndarray:
    if operand.dtype.kind == "f" and np.dtype(new_dtype).kind in "iu":
        return NotImplemented  # JAX saturates where NumPy wraps
    if operand.dtype.kind == "c" and np.dtype(new_dtype).kind != "c":
        return NotImplemented  # JAX takes the real part, NumPy warns
    return operand.astype(new_dtype)


def _dot_general(
    left: np.ndarray, right: np.ndarray, *, dimension_numbers: Sequence[Sequence[Sequence[int]]], **_: object
) -> np.ndarray:
    if left.dtype.kind != "f" or right.dtype.kind != "f":
        return NotImplemented
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    left_free = [axis for axis in range(left.ndim) if axis not in (*left_sum, *left_batch)]
    right_free = [axis for axis in range(right.ndim) if axis not in (*right_sum, *right_batch)]
    batch = [left.shape[axis] for axis in left_batch]
    rows, columns = [left.shape[axis] for axis in left_free], [right.shape[axis] for axis in right_free]
    inner = int(np.prod([left.shape[axis] for axis in left_sum], dtype=np.int64))
    size = functools.partial(np.prod, dtype=np.int64)
    first = left.transpose([*left_batch, *left_free, *left_sum]).reshape([*batch, int(size(rows)), inner])
    second = right.transpose([*right_batch, *right_sum, *right_free]).reshape([*batch, inner, int(size(columns))])
    return np.matmul(first, second).reshape([*batch, *rows, *columns])


def _reduce(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda operand, *, axes, **_: function(operand, axis=tuple(int(axis) for axis in axes))


def _extreme(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def reduce(operand: np.ndarray, *, axes: Sequence[int], **_: object) -> np.ndarray:
        if 0 in operand.shape:
            return NotImplemented
        return function(operand, axis=tuple(int(axis) for axis in axes))

    return reduce


def _index_of(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda operand, *, axes, index_dtype, **_: function(operand, axis=int(axes[0])).astype(index_dtype)


def _cumulative(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def accumulate(operand: np.ndarray, *, axis: int, reverse: bool, **_: object) -> np.ndarray:
        turned = np.flip(operand, axis) if reverse else operand
        result = function(turned, axis=axis)
        return np.flip(result, axis) if reverse else result

    return accumulate


def _split(operand: np.ndarray, *, sizes: Sequence[int], axis: int, **_: object) -> list[np.ndarray]:
    return np.split(operand, np.cumsum(sizes)[:-1], axis=axis)


def _floating(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Make an operation that is left to JAX for other than floating-point operands."""
    return lambda *operands, **_: function(*operands) if operands[0].dtype.kind == "f" else NotImplemented


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(np, name)) for name in ("exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "tan")},
    **{name: _plain(getattr(np, name)) for name in ("tanh", "sinh", "cosh", "sqrt", "cbrt", "floor", "ceil", "abs")},
    **{name: _plain(getattr(np, f"arc{name[1:]}")) for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{name: _plain(getattr(np, name)) for name in ("square", "sign")},
    **{name: _plain(function) for name, function in (("max", np.maximum), ("min", np.minimum), ("atan2", np.arctan2))},
    **{name: _plain(function) for name, function in (("add", np.add), ("add_any", np.add), ("sub", np.subtract))},
    **{name: _plain(function) for name, function in (("mul", np.multiply), ("neg", np.negative))},
    **{name: _plain(function) for name, function in (("eq", np.equal), ("ne", np.not_equal), ("lt", np.less))},
    **{name: _plain(function) for name, function in (("le", np.less_equal), ("gt", np.greater))},
    "ge": _plain(np.greater_equal),
    **{name: _plain(function) for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or))},
    "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "div": _divide,
    "pow": _floating(np.power),
    "rem": _remainder,
    "integer_pow": lambda operand, *, y, **_: operand**y if operand.dtype.kind == "f" else NotImplemented,
    "rsqrt": _plain(lambda operand: 1.0 / np.sqrt(operand)),
    "logistic": _special("expit"),
    "erf": _special("erf"),
    "erfc": _special("erfc"),
    "erf_inv": _special("erfinv"),
    "lgamma": _special("gammaln"),
    "digamma": _special("digamma"),
    "is_finite": _plain(np.isfinite),
    "clamp": _plain(lambda low, operand, high: np.minimum(np.maximum(operand, low), high)),
    "select_n": _select,
    **{name: _plain(lambda operand: operand) for name in ("stop_gradient", "copy", "copy_p", "reduce_precision")},
    "optimization_barrier": lambda *operands, **_: list(operands),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda operand, *, dimensions, **_: np.squeeze(operand, tuple(int(axis) for axis in dimensions)),
    "expand_dims": lambda operand, *, dimensions, **_: np.expand_dims(operand, tuple(dimensions)),
    "transpose": lambda operand, *, permutation, **_: operand.transpose(permutation),
    "rev": lambda operand, *, dimensions, **_: np.flip(operand, tuple(dimensions)),
    "concatenate": lambda *operands, dimension, **_: np.concatenate(operands, axis=dimension),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "split": _split,
    "stack": lambda *operands, axis, **_: np.stack(operands, axis),
    "tile": lambda operand, *, reps, **_: np.tile(operand, reps),
    "iota": _iota,
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    "reduce_sum": _reduce(np.sum),
    "reduce_prod": _reduce(np.prod),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "reduce_max": _extreme(np.max),
    "reduce_min": _extreme(np.min),
    "argmax": _index_of(np.argmax),
    "argmin": _index_of(np.argmin),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
}
"""Operation -> NumPy function of its operands and parameters; NotImplemented leaves the call to JAX."""
