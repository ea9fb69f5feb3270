"""Tensors whose elements are in another order than C's in their file: strides, and reading in C order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .base import Array, TensorInfo, numpy_dtype

PART = 1 << 24
"""Bytes that are read at a time, where a single element of the longest stride has no more."""


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def is_c_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements are contiguous in C order."""
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
    dtype: np.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Array:
    """Return a tensor in C order.

    Args:
        read: returns bytes by (start, count), with start relative to the tensor's first element.
        dtype: of its elements.
        shape: its shape.
        strides: its strides in elements, none negative.
    """
    whole = np.empty(tuple(shape), dtype)

    def fill(into: Array, shape: list[int], first: int) -> None:
        # Cut along the axis of the longest stride: the span of each part is shortest then.
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


class StridedTensor:
    """A tensor that is read in C order; its copy is held in memory where the file has another order.

    Args:
        info: its name, dtype and shape.
        read: returns bytes by (start, count), with start relative to the tensor's first element.
        strides: its strides in elements, none negative.
        is_swapped: whether its numbers are big-endian.
    """

    def __init__(
        self,
        info: TensorInfo,
        read: Callable[[int, int], bytes | memoryview],
        strides: Sequence[int],
        *,
        is_swapped: bool = False,
    ):
        self.info, self._read, self._strides, self._is_swapped = info, read, strides, is_swapped
        self._is_plain = not is_swapped and is_c_order(info.shape, strides)
        self._gathered: memoryview | None = None

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes ``start:stop`` of its elements in C order."""
        if self._is_plain:
            return self._read(start, stop - start) if stop > start else b""
        if self._gathered is None:
            whole = gather(self._read, np.dtype(f"V{self.info.itemsize}"), self.info.shape, self._strides)
            whole = whole.view(numpy_dtype(self.info.dtype)).byteswap() if self._is_swapped else whole
            self._gathered = whole.reshape(-1).view("uint8").data
        return self._gathered[start:stop]

    def release(self) -> None:
        """Free its copy in C order."""
        self._gathered = None
