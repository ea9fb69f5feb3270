"""A quantised checkpoint, read as one of floating point: every range of bytes is made of the blocks that it touches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...printable import printable
from ..containers.base import Array, CheckpointError, Reader, TensorInfo, numpy_dtype
from ..containers.files import boxes, check_range
from .numbers import Numbers, float8_values
from .pairs import GROUP, MXFP4, QuantisedTensor, find

TILE = 1 << 18
"""Numbers that are made at a time; what it takes to make them stays in the caches."""

SPARSE = 4
"""A rectangle is read with what lies between its rows if that is at most this many times its own bytes."""


class _Wrapped(Reader):
    """What another reader is, but for its tensors."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self.path: Path = reader.path
        self.metadata: dict[str, Any] = reader.metadata

    @property
    def format(self) -> str:  # type: ignore[override]  # that of the reader, of which there are several
        """Container of the file."""
        return self._reader.format

    @property
    def random_access(self) -> bool:  # type: ignore[override]  # as above
        """Whether `read_range` costs no more than the bytes it returns."""
        return self._reader.random_access

    def files(self) -> list[Path]:
        """Return every file."""
        return self._reader.files()

    def close(self) -> None:
        """Close its files."""
        self._reader.close()


class Headers(_Wrapped):
    """The tensors of a quantised checkpoint by the names and shapes that layouts know; nothing is read through it.

    Args:
        reader: the quantised checkpoint.
        tensors: name -> what a plan is made of.
    """

    def __init__(self, reader: Reader, tensors: dict[str, TensorInfo]):
        super().__init__(reader)
        self.tensors = tensors

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Refuse: it has headers alone."""
        raise CheckpointError(f"{printable(name)} can't be read by its header")


class Dequantised(_Wrapped):
    """A quantised checkpoint whose tensors of numbers are floating point, under their own names and in their own order.

    Scales are not among its tensors.

    Args:
        reader: the quantised checkpoint.
        config: the model's config.json.
        dtype: what the quantised tensors become.

    Attributes:
        originals: the quantised checkpoint.
        quantised: name of numbers -> how they are quantised.
        headers: the same tensors by the names and shapes that layouts know.

    Raises:
        CheckpointError: what is quantised can't be dequantised, or nothing is.
    """

    def __init__(self, reader: Reader, config: Mapping[str, Any], dtype: str):
        super().__init__(reader)
        self.originals = reader
        self.quantised: dict[str, QuantisedTensor] = {
            one.numbers: one for one in find(reader.path, reader.tensors, config)
        }
        scales = {one.scales for one in self.quantised.values()}
        self.tensors, headers = {}, {}
        for name, info in reader.tensors.items():
            one = self.quantised.get(name)
            if one is not None:
                self.tensors[name] = TensorInfo(name, dtype, one.file_shape, info.file)
                headers[one.name] = TensorInfo(one.name, dtype, one.shape, info.file)
            elif name not in scales:
                self.tensors[name] = headers[name] = info
        self.headers = Headers(reader, headers)
        self.dtype = numpy_dtype(dtype)
        self._pairs: dict[Numbers, Array] = {}
        self._exact: dict[str, bool] = {}

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        if name not in self.quantised:
            return self._reader.read_range(name, start, stop)
        check_range(self.path, self.tensors[name], start, stop)
        width = self.dtype.itemsize
        first, last = start // width, -(-stop // width)
        found = np.empty(last - first, self.dtype)
        self._fill(self.quantised[name], Numbers(self.dtype), first, found)
        return found.view(np.uint8).data[start - first * width : stop - first * width]

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into memory that is there."""
        width = self.dtype.itemsize
        if name not in self.quantised:
            self._reader.read_into(name, start, into)
        elif start % width or len(into) % width:
            into[:] = self.read_range(name, start, start + len(into))
        else:
            check_range(self.path, self.tensors[name], start, start + len(into))
            found = np.frombuffer(into, self.dtype)
            self._fill(self.quantised[name], Numbers(self.dtype), start // width, found)

    def changed(self, name: str, first: int, last: int) -> int:
        """Return how many of the elements ``first:last`` of a quantised tensor rounding changes."""
        one, numbers = self.quantised[name], Numbers(self.dtype, changed=True)
        if name not in self._exact:
            self._exact[name] = self._is_exact(one, numbers)
        if self._exact[name]:
            return 0
        count = 0
        for start in range(first, last, TILE):
            found = np.empty(min(last, start + TILE) - start, bool)
            self._fill(one, numbers, start, found)
            count += int(np.count_nonzero(found))
        return count

    def _is_exact(self, one: QuantisedTensor, numbers: Numbers) -> bool:
        """Return whether none of the scales makes a number that has to be rounded, whatever the numbers are."""
        info = self._reader.tensors[one.scales]
        step = TILE // 256 * info.itemsize
        for start in range(0, info.nbytes, step):
            data = self._reader.read_range(one.scales, start, min(info.nbytes, start + step))
            if one.kind == MXFP4:
                present = np.unique(np.frombuffer(data, np.uint8))
                is_changed = self._pairs_of(numbers).reshape(256, 256)[present].any()
            else:
                scales = np.frombuffer(data, numpy_dtype(info.dtype)).astype(np.float64)
                is_changed = numbers.of(*np.broadcast_arrays(float8_values(one.kind)[None], scales[:, None])).any()
            if is_changed:
                return False
        return True

    def _fill(self, one: QuantisedTensor, numbers: Numbers, first: int, into: Array) -> None:
        """Make as many elements as there is room for, from element `first` in the order of the file on."""
        columns = one.file_shape[-1]
        shape = math.prod(one.file_shape[:-1]), columns
        make = self._mxfp4 if one.kind == MXFP4 else self._float8
        done = 0
        for box in boxes(shape, first, first + into.size):
            rows, across = box if len(box) > 1 else (*box, slice(0, columns))
            width = across.stop - across.start
            size = (rows.stop - rows.start) * width
            part = into[done : done + size].reshape(-1, width)
            done += size
            step = max(1, TILE // width)
            for row in range(rows.start, rows.stop, step):
                for column in range(across.start, across.stop, TILE):
                    last, end = min(rows.stop, row + step), min(across.stop, column + TILE)
                    where = np.s_[row - rows.start : last - rows.start, column - across.start : end - across.start]
                    part[where] = make(one, numbers, row, last, column, end)

    def _mxfp4(self, one: QuantisedTensor, numbers: Numbers, row: int, last: int, column: int, end: int) -> Array:
        """Return a rectangle of numbers: each byte and its scale say both numbers of it, rounded before."""
        first, groups = column // GROUP, -(-end // GROUP) - column // GROUP
        size = one.file_shape[-1]
        half = GROUP // 2
        codes = self._rectangle(one.numbers, size // 2, row, last, first * half, (first + groups) * half)
        scales = self._rectangle(one.scales, size // GROUP, row, last, first, first + groups)
        index = codes.reshape(last - row, groups, half) | scales.astype(np.uint16)[..., None] << 8
        made = self._pairs_of(numbers)[index].view(numbers.result).reshape(last - row, groups * GROUP)
        found: Array = made[:, column - first * GROUP : end - first * GROUP]
        return found

    def _pairs_of(self, numbers: Numbers) -> Array:
        if numbers not in self._pairs:
            self._pairs[numbers] = numbers.of_pairs()
        return self._pairs[numbers]

    def _float8(self, one: QuantisedTensor, numbers: Numbers, row: int, last: int, column: int, end: int) -> Array:
        """Return a rectangle of numbers: by a table for every block, or each by itself where there are many blocks."""
        (high, wide), (rows, columns) = one.block, one.file_shape[-2:]
        codes = self._rectangle(one.numbers, columns, row, last, column, end)
        info = self._reader.tensors[one.scales]
        down, across = -(-rows // high), -(-columns // wide)
        lines = np.arange(row, last)
        lines = lines // rows * down + lines % rows // high
        places = np.arange(column, end) // wide
        top, left, right = int(lines[0]), int(places[0]), int(places[-1]) + 1
        width = info.itemsize
        raw = self._rectangle(one.scales, across * width, top, int(lines[-1]) + 1, left * width, right * width)
        scales = np.ascontiguousarray(raw).view(numpy_dtype(info.dtype)).astype(np.float64)
        values = float8_values(one.kind)
        if scales.size * 256 > codes.size:
            return numbers.of(values[codes], scales[(lines - top)[:, None], places - left])
        tables = numbers.of(*np.broadcast_arrays(values, scales.reshape(-1, 1))).reshape(-1)
        index = ((lines - top) * ((right - left) * 256))[:, None] + (places - left) * 256 + codes
        found: Array = tables[index]
        return found

    def _rectangle(self, name: str, width: int, row: int, last: int, left: int, right: int) -> Array:
        """Return bytes ``left:right`` of rows ``row:last`` of a tensor, whose rows have `width` bytes."""
        own = right - left
        if own == width:
            data = self._reader.read_range(name, row * width, last * width)
            return np.frombuffer(data, np.uint8).reshape(last - row, width)
        if width <= SPARSE * own or last - row == 1:
            data = self._reader.read_range(name, row * width + left, (last - 1) * width + right)
            flat = np.frombuffer(data, np.uint8)
            return np.lib.stride_tricks.as_strided(flat, (last - row, own), (width, 1), writeable=False)
        found = np.empty((last - row, own), np.uint8)
        for number, at in enumerate(range(row, last)):
            self._reader.read_into(name, at * width + left, found[number].data)
        return found
