"""Tensors that lie in a file in another order than C's: read through their strides, a bounded part at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .base import Array

PART = 1 << 24
"""Bytes that are read at a time, where a single element of the longest stride has no more."""


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def is_c_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements lie one after the other in C order."""
    if 0 in shape:
        return True
    wanted = c_strides(shape)
    return all(size == 1 or one == other for size, one, other in zip(shape, strides, wanted, strict=True))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return from how many elements on a tensor's elements come, first to last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def gather(
    read: Callable[[int, int], bytes | memoryview],
    dtype: np.dtype[Any],
    shape: Sequence[int],
    strides: Sequence[int],
) -> Array:
    """Return a tensor in C order.

    Args:
        read: gives bytes from a start on, so many of them, counted from the tensor's first element.
        dtype: of its elements.
        shape: its shape.
        strides: its strides in elements, none negative.
    """
    whole = np.empty(tuple(shape), dtype)

    def fill(into: Array, shape: list[int], first: int) -> None:
        axis = max((axis for axis, size in enumerate(shape) if size > 1), key=lambda axis: strides[axis], default=None)
        span = extent(shape, strides)
        if axis is None or span * dtype.itemsize <= PART:
            data = np.frombuffer(read(first * dtype.itemsize, span * dtype.itemsize), dtype)
            steps = [stride * dtype.itemsize for stride in strides]
            into[...] = np.lib.stride_tricks.as_strided(data, shape, steps)
            return
        rest = (extent([*shape[:axis], 1, *shape[axis + 1 :]], strides) - 1) * dtype.itemsize
        step = max(1, (PART - rest) // max(strides[axis] * dtype.itemsize, 1))
        for begin in range(0, shape[axis], step):
            end = min(begin + step, shape[axis])
            where = (slice(None),) * axis + (slice(begin, end),)
            fill(into[where], [*shape[:axis], end - begin, *shape[axis + 1 :]], first + begin * strides[axis])

    if whole.size:
        fill(whole, list(shape), 0)
    return whole
