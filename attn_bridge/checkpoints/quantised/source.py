"""Bytes and small tensors of a quantised checkpoint, as tiles of its numbers need them."""

from __future__ import annotations

import numpy as np

from ..containers.base import SPARSE, Array, Reader, numpy_dtype


class Source:
    """Reads parts of the tensors that a quantised checkpoint holds.

    Args:
        reader: the checkpoint.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self._whole: dict[str, Array] = {}

    def whole(self, name: str) -> Array:
        """Return a small tensor, such as a table, which stays in memory."""
        if name not in self._whole:
            self._whole[name] = self._reader.read(name)
        return self._whole[name]

    def elements(self, name: str, start: int, stop: int) -> Array:
        """Return elements ``start:stop`` of a tensor in C order."""
        dtype = numpy_dtype(self._reader.tensors[name].dtype)
        data = self._reader.read_range(name, start * dtype.itemsize, stop * dtype.itemsize)
        return np.frombuffer(data, dtype)

    def matrix(self, name: str, rows: range, left: int, right: int) -> Array:
        """Return columns ``left:right`` of rows of a matrix, or of a single number."""
        info = self._reader.tensors[name]
        size = info.itemsize
        raw = self.rectangle(name, (info.shape or (1,))[-1] * size, rows, left * size, right * size)
        return np.ascontiguousarray(raw).view(numpy_dtype(info.dtype))

    def rectangle(self, name: str, width: int, rows: range, left: int, right: int) -> Array:
        """Return bytes ``left:right`` of rows of a tensor, whose rows have `width` bytes."""
        own, between = right - left, width * rows.step
        if between <= SPARSE * own or len(rows) == 1:
            data = self._reader.read_range(name, rows[0] * width + left, rows[-1] * width + right)
            flat = np.frombuffer(data, np.uint8)
            return np.lib.stride_tricks.as_strided(flat, (len(rows), own), (between, 1), writeable=False)
        result = np.empty((len(rows), own), np.uint8)
        self._reader.read_rows(name, rows[0] * width + left, between, result)
        return result
