"""A quantised checkpoint, read as floating point: every range of bytes is computed from the blocks that it touches.

`DequantisedNumbers` computes the dequantised values: the exact product with the scale, rounded once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...printable import printable
from ...weights.placements import rounded
from ..containers.base import Array, CheckpointError, Reader, TensorInfo, numpy_dtype
from ..containers.files import boxes, check_range
from ..readers import Wrapped
from .compressed import undescribed
from .pairs import GROUP, MXFP4, QuantisedTensor, TiledTensor, of_activations
from .searching import default_dtype, find
from .source import Source
from .tables import BYTES, E2M1, E8M0, float8_values

_PAIRS: dict[int, Any] = {1: np.uint16, 2: np.uint32, 4: np.uint64, 8: np.complex128}
"""Bytes of a number -> a dtype that two of them fill."""


@dataclasses.dataclass(frozen=True)
class DequantisedNumbers:
    """Computes numbers of a dtype from quantised ones, or marks those that rounding changes.

    Attributes:
        dtype: dtype to round to.
        changed: whether to return marks instead of numbers.
    """

    dtype: np.dtype
    changed: bool = False

    @property
    def result(self) -> np.dtype:
        """Dtype of the result."""
        return np.dtype(bool) if self.changed else self.dtype

    def of(self, values: Array, scales: Array) -> Array:
        """Return the products of float64 values and scales: exact, since both have few bits, then rounded once."""
        with np.errstate(all="ignore"):
            product = values * scales
        lost = np.isnan(product)
        if lost.any():  # the sign of a NaN that a processor makes is its own affair
            product = np.where(lost, np.copysign(np.nan, values), product)
        made = rounded(product, self.dtype)
        if not self.changed:
            return made
        changed: Array = (made.astype(np.float64) != product) & ~lost
        return changed

    def of_pairs(self) -> Array:
        """Return, for every scale of MXFP4 and every byte, the two numbers in that byte, low half first, as one word.

        It is indexed by ``scale * 256 + byte``.
        """
        pairs = np.stack([E2M1[BYTES & 15], E2M1[BYTES >> 4]], axis=-1)
        made = self.of(*np.broadcast_arrays(pairs[None], E8M0[:, None, None]))
        return np.ascontiguousarray(made).reshape(-1).view(_PAIRS[self.result.itemsize])


def scale_dtype(scales: TensorInfo) -> np.dtype:
    """Return the dtype of float8's scales: bytes are exponents (MXFP8)."""
    return numpy_dtype("float8_e8m0fnu" if scales.dtype == "uint8" else scales.dtype)


TILE = 1 << 18
"""Elements computed at a time; their intermediate results stay in the caches."""


FAR = 16
"""Maximum distance of rows in a tile, since reads of their scales include the rows between."""


class Headers(Wrapped):
    """The tensors of a quantised checkpoint by the names and shapes of layouts; headers only, without data.

    Args:
        reader: the quantised checkpoint.
        tensors: name -> header, for plans.
    """

    def __init__(self, reader: Reader, tensors: dict[str, TensorInfo]):
        super().__init__(reader)
        self.tensors = tensors

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Refuse to read."""
        raise CheckpointError(f"{printable(name)} can't be read by its header")


class Dequantised(Wrapped):
    """A quantised checkpoint whose quantised tensors are floating point, under their own names and in their own order.

    Scales are not among its tensors.

    Args:
        reader: the quantised checkpoint.
        config: the model's config.json.
        dtype: dtype of the dequantised tensors; "" is that of `default_dtype`.

    Attributes:
        originals: the quantised checkpoint.
        quantised: name of numbers -> how they are quantised.
        headers: the same tensors by the names and shapes of layouts.
        dropped: name of a tensor that dequantisation makes useless -> why.

    Raises:
        CheckpointError: a tensor can't be dequantised, or none is quantised.
    """

    def __init__(self, reader: Reader, config: Mapping[str, object], dtype: str):
        super().__init__(reader)
        self.originals = reader
        self._source = Source(reader)
        self.quantised: dict[str, QuantisedTensor] = {one.numbers: one for one in find(reader, config)}
        dtype = dtype or default_dtype(reader.tensors, self.quantised, config)
        scales = {name for one in self.quantised.values() for name in one.others}
        self.dropped = of_activations(reader.tensors, (one.name for one in self.quantised.values()))
        self.tensors, headers = {}, {}
        for name, info in reader.tensors.items():
            tensor = self.quantised.get(name)
            if tensor is not None:
                self.tensors[name] = TensorInfo(name, dtype, tensor.file_shape, info.file)
                headers[tensor.name] = TensorInfo(tensor.name, dtype, tensor.shape, info.file)
            elif name not in scales:
                self.tensors[name] = info
                if name not in self.dropped:
                    headers[name] = info
        self.metadata = undescribed(reader.metadata)
        self.headers = Headers(reader, headers)
        self.headers.metadata = self.metadata
        self.dtype = numpy_dtype(dtype)
        self._pairs: dict[DequantisedNumbers, Array] = {}
        self._exact: dict[str, bool] = {}

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        if name not in self.quantised:
            return self._reader.read_range(name, start, stop)
        check_range(self.path, self.tensors[name], start, stop)
        width = self.dtype.itemsize
        first, last = start // width, -(-stop // width)
        values = np.empty(last - first, self.dtype)
        self._fill(self.quantised[name], DequantisedNumbers(self.dtype), first, values)
        return values.view(np.uint8).data[start - first * width : stop - first * width]

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into `into`."""
        width = self.dtype.itemsize
        if name not in self.quantised:
            self._reader.read_into(name, start, into)
        elif start % width or len(into) % width:
            into[:] = self.read_range(name, start, start + len(into))
        else:
            check_range(self.path, self.tensors[name], start, start + len(into))
            values = np.frombuffer(into, self.dtype)
            self._fill(self.quantised[name], DequantisedNumbers(self.dtype), start // width, values)

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix, each row `step` elements behind the one before."""
        if name not in self.quantised:
            self._reader.read_rows(name, start, step, into)
        else:
            self._fill_rows(self.quantised[name], DequantisedNumbers(self.dtype), start, step, into)

    def changed(self, name: str, start: int, step: int, rows: int, run: int) -> int:
        """Return how many elements of such a matrix, with rows of `run` elements, rounding changes."""
        tensor, numbers = self.quantised[name], DequantisedNumbers(self.dtype, changed=True)
        if name not in self._exact:
            self._exact[name] = self._is_exact(tensor, numbers)
        if self._exact[name] or not rows * run:
            return 0
        count, most = 0, max(1, TILE // run)
        for row in range(0, rows, most):
            for first in range(0, run, TILE):
                flags = np.empty((min(rows - row, most), min(run - first, TILE)), bool)
                self._fill_rows(tensor, numbers, start + row * step + first, step, flags)
                count += int(np.count_nonzero(flags))
        return count

    def _is_exact(self, tensor: QuantisedTensor, numbers: DequantisedNumbers) -> bool:
        """Return whether products with the scales are exact for all possible numbers, so that nothing is rounded."""
        if isinstance(tensor, TiledTensor):
            return False
        info = self._reader.tensors[tensor.scales]
        step = TILE // 256 * info.itemsize
        for start in range(0, info.nbytes, step):
            data = self._reader.read_range(tensor.scales, start, min(info.nbytes, start + step))
            if tensor.kind == MXFP4:
                present = np.unique(np.frombuffer(data, np.uint8))
                is_changed = self._pairs_of(numbers).reshape(256, 256)[present].any()
            else:
                scales = np.frombuffer(data, scale_dtype(info)).astype(np.float64)
                is_changed = numbers.of(*np.broadcast_arrays(float8_values(tensor.kind)[None], scales[:, None])).any()
            if is_changed:
                return False
        return True

    def _fill_rows(
        self, tensor: QuantisedTensor, numbers: DequantisedNumbers, start: int, step: int, into: Array
    ) -> None:
        """Fill a matrix from element `start` in the order of the file on, each row `step` after the previous one."""
        rows, run = into.shape
        columns = tensor.file_shape[-1]
        if rows > 1 and step and step % columns == 0 and start % columns + run <= columns:
            first, jump = start // columns, step // columns
            self._tiles(tensor, numbers, range(first, first + rows * jump, jump), start % columns, into)
            return
        for number in range(rows):
            self._fill(tensor, numbers, start + number * step, into[number])

    def _fill(self, tensor: QuantisedTensor, numbers: DequantisedNumbers, first: int, into: Array) -> None:
        """Fill `into` with elements from element `first` in the order of the file on."""
        columns = tensor.file_shape[-1]
        done = 0
        for box in boxes((math.prod(tensor.file_shape[:-1]), columns), first, first + into.size):
            rows, across = box if len(box) > 1 else (*box, slice(0, columns))
            size = (rows.stop - rows.start) * (across.stop - across.start)
            part = into[done : done + size].reshape(rows.stop - rows.start, -1)
            self._tiles(tensor, numbers, range(rows.start, rows.stop), across.start, part)
            done += size

    def _tiles(
        self, tensor: QuantisedTensor, numbers: DequantisedNumbers, rows: range, column: int, into: Array
    ) -> None:
        """Fill a rectangle, a tile at a time."""
        tables = self._mxfp4 if tensor.kind == MXFP4 else self._float8
        width = into.shape[1]
        most = max(1, TILE // max(width, rows.step // FAR, 1))
        for first in range(0, len(rows), most):
            for left in range(0, width, TILE):
                right = min(width, left + TILE)
                rectangle = rows[first : first + most], column + left, column + right
                if isinstance(tensor, TiledTensor):
                    tile = numbers.of(*np.broadcast_arrays(*tensor.tile(self._source, *rectangle)))
                else:
                    tile = tables(tensor, numbers, *rectangle)
                into[first : first + most, left:right] = tile

    def _mxfp4(self, tensor: QuantisedTensor, numbers: DequantisedNumbers, rows: range, column: int, end: int) -> Array:
        """Return a rectangle of numbers, from a table of rounded pairs by byte and scale."""
        first, groups = column // GROUP, -(-end // GROUP) - column // GROUP
        size = tensor.file_shape[-1]
        half = GROUP // 2
        codes = self._source.rectangle(tensor.numbers, size // 2, rows, first * half, (first + groups) * half)
        scales = self._source.rectangle(tensor.scales, size // GROUP, rows, first, first + groups)
        index = codes.reshape(len(rows), groups, half) | scales.astype(np.uint16)[..., None] << 8
        made = self._pairs_of(numbers)[index].view(numbers.result).reshape(len(rows), groups * GROUP)
        rectangle: Array = made[:, column - first * GROUP : end - first * GROUP]
        return rectangle

    def _pairs_of(self, numbers: DequantisedNumbers) -> Array:
        if numbers not in self._pairs:
            self._pairs[numbers] = numbers.of_pairs()
        return self._pairs[numbers]

    def _float8(
        self, tensor: QuantisedTensor, numbers: DequantisedNumbers, rows: range, column: int, end: int
    ) -> Array:
        """Return a rectangle of numbers: from a table per block, or computed one by one if there are many blocks."""
        (high, wide), (height, columns) = tensor.block, tensor.file_shape[-2:]
        codes = self._source.rectangle(tensor.numbers, columns, rows, column, end)
        info = self._reader.tensors[tensor.scales]
        down, across = -(-height // high), -(-columns // wide)
        lines = np.array(rows)
        lines = lines // height * down + lines % height // high
        places = np.arange(column, end) // wide
        top, left, right = int(lines[0]), int(places[0]), int(places[-1]) + 1
        width = info.itemsize
        raw = self._source.rectangle(
            tensor.scales, across * width, range(top, int(lines[-1]) + 1), left * width, right * width
        )
        scales = np.ascontiguousarray(raw).view(scale_dtype(info)).astype(np.float64)
        values = float8_values(tensor.kind)
        if scales.size * 256 > codes.size:
            return numbers.of(values[codes], scales[(lines - top)[:, None], places - left])
        tables = numbers.of(*np.broadcast_arrays(values, scales.reshape(-1, 1))).reshape(-1)
        index = ((lines - top) * ((right - left) * 256))[:, None] + (places - left) * 256 + codes
        rectangle: Array = tables[index]
        return rectangle
