"""What is in memory as a checkpoint: arrays, modules whose weights devices share, and numbers in place of elements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..weights import Region, everything
from .containers.base import Array, Reader, TensorInfo, rows_as_region


class ArraysReader(Reader):
    """Arrays in memory as a checkpoint to be written.

    Args:
        arrays: name -> array.
    """

    format: ClassVar[str] = "memory"

    def __init__(self, arrays: Mapping[str, Array]):
        self.path = Path("<memory>")
        self.tensors = {name: TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()}
        self.metadata: dict[str, Any] = {}
        self._arrays = dict(arrays)

    def files(self) -> list[Path]:
        """Return no file."""
        return []

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        flat = np.ascontiguousarray(self._arrays[name]).reshape(-1).view(np.uint8)
        return flat[start:stop].data


class SharedReader(Reader):
    """The weights of a module that devices share, put together a tensor or a part of one at a time.

    Args:
        described: name -> shape and dtype name.
        read: gives a region of a weight by name.
    """

    format: ClassVar[str] = "memory"

    def __init__(self, described: Mapping[str, tuple[tuple[int, ...], str]], read: Callable[[str, Region], Array]):
        self.path = Path("<memory>")
        self.tensors = {name: TensorInfo(name, dtype, shape) for name, (shape, dtype) in described.items()}
        self.metadata: dict[str, Any] = {}
        self._read = read

    def files(self) -> list[Path]:
        """Return no file."""
        return []

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a weight: of the rows that hold them, no others are read; where a row has all, of its own."""
        info = self.tensors[name]
        region, first, size = list(everything(info.shape)), 0, info.nbytes
        for axis, count in enumerate(info.shape if start < stop else ()):
            size //= count
            low, high = (start - first) // size, -(-(stop - first) // size)
            region[axis], first = (low, high), first + low * size
            if high - low > 1:
                break
        flat = np.ascontiguousarray(self._read(name, tuple(region))).reshape(-1).view(np.uint8)
        return flat[start - first : stop - first].data

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix: where its rows are those of the weight, no others are read, nor other columns."""
        found = rows_as_region(self.tensors[name].shape, start, step, *into.shape)
        if found is None:
            super().read_rows(name, start, step, into)
            return
        region, axis, where = found
        block = self._read(name, tuple(region))
        into[...] = block.reshape(-1, math.prod(block.shape[axis:]))[where]


class NumberedReader(Reader):
    """A checkpoint in float64 whose elements hold their own numbers, counted over all tensors.

    Args:
        reader: the checkpoint.
    """

    format: ClassVar[str] = "memory"

    def __init__(self, reader: Reader):
        self.path, self.metadata, self.unread = reader.path, reader.metadata, reader.unread
        self.tensors = {
            name: dataclasses.replace(info, dtype="float64") if "float" in info.dtype else info
            for name, info in reader.tensors.items()
        }
        sizes = [math.prod(info.shape) for info in self.tensors.values()]
        starts = np.cumsum([1, *sizes])  # from 1: zero is what a module may hold that no element was written to
        self._starts = dict(zip(self.tensors, map(int, starts), strict=False))

    def files(self) -> list[Path]:
        """Return no file."""
        return []

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        first, last = start // 8, -(-stop // 8)
        found = np.arange(first, last, dtype=np.float64) + self._starts[name]
        return found.view(np.uint8)[start - 8 * first : stop - 8 * first].data
