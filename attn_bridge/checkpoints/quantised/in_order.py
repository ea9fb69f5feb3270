"""A dequantised checkpoint by the names, shapes and order that layouts and adapters know, whatever the file's are."""

from __future__ import annotations

import math

import numpy as np

from ..containers.base import Array, Reader
from ..containers.files import check_range
from ..readers import Wrapped
from .pairs import QuantisedTensor, c_order
from .reader import Dequantised


class InOrder(Wrapped):
    """Tensors of a dequantised checkpoint, each with its last two axes turned back where the file has them turned.

    Args:
        packed: the checkpoint.

    Attributes:
        packed: the same.
        quantised: name of a tensor -> how it is quantised.
    """

    def __init__(self, packed: Dequantised):
        super().__init__(packed)
        self.packed = packed
        self.tensors = packed.headers.tensors
        self.quantised: dict[str, QuantisedTensor] = {one.name: one for one in packed.quantised.values()}

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        one = self.quantised.get(name)
        if one is None:
            return self.packed.read_range(name, start, stop)
        info = self.tensors[name]
        check_range(self.path, info, start, stop)
        if one.strides == c_order(one.shape):
            return self.packed.read_range(one.numbers, start, stop)
        columns, width = info.shape[-1], info.itemsize
        first, last = start // (columns * width), -(-stop // (columns * width))
        rows = self._rows(one, first, last)
        return rows.reshape(-1).view(np.uint8).data[start - first * columns * width : stop - first * columns * width]

    def _rows(self, one: QuantisedTensor, first: int, last: int) -> Array:
        """Return rows of a tensor whose last two axes the file has in turn."""
        height, columns = one.shape[-2:]
        made = np.empty((last - first, columns), self.packed.dtype)
        row = first
        while row < last:
            matrix, top = divmod(row, height)
            count = min(last - row, height - top)
            turned = np.empty((columns, count), self.packed.dtype)
            self.packed.read_rows(one.numbers, matrix * height * columns + top, height, turned)
            made[row - first : row - first + count] = turned.T
            row += count
        return made

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into memory that exists."""
        into[:] = self.read_range(name, start, start + len(into))


def is_in_order(one: QuantisedTensor) -> bool:
    """Whether the file has a tensor as it is, or with its last two axes in turn."""
    if one.strides == c_order(one.shape):
        return True
    leading, (height, columns) = one.shape[:-2], one.shape[-2:]
    front = tuple(size * height * columns for size in c_order(leading))
    return len(one.shape) > 1 and one.strides == (*front, 1, height) and math.prod(one.shape) > 0


def dequantised_in(reader: Reader) -> Dequantised | None:
    """Return the dequantised checkpoint that a reader is, or shows in order; None where nothing is quantised."""
    inner = reader.packed if isinstance(reader, InOrder) else reader
    return inner if isinstance(inner, Dequantised) else None
