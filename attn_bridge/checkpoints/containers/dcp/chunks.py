"""Tensors cut into chunks that fill them, and a reader of any part of them."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from ....printable import printable
from ..base import GAP, SPARSE, Array, Reader, TensorInfo, rows_as_region
from ..files import bad, boxes, check_range
from ..sources import OrderedTensor
from ..strided import c_strides, extent

MAX_CORNERS = 1 << 24
"""Corners of a tensor's chunks that are counted to see whether they fill it."""

MAX_SPAN = 1 << 24
"""Maximum bytes per read, including gaps between the elements."""

Box = list[tuple[int, int]]
"""(start, stop) for each axis."""


Location = TypeVar("Location")


@dataclasses.dataclass(frozen=True)
class Chunks(Generic[Location]):
    """A tensor cut into boxes that fill it.

    Attributes:
        info: the whole tensor.
        starts: (chunk, axis), first element of each.
        stops: (chunk, axis), the end of each, exclusive.
        items: where each is stored, as the reader has it.
    """

    info: TensorInfo
    starts: Array
    stops: Array
    items: tuple[Location, ...]

    def overlapping(self, box: Sequence[tuple[int, int]]) -> list[int]:
        """Return the numbers of the chunks that hold elements of a box, (start, stop) for each axis."""
        first, last = (np.array([bounds[side] for bounds in box], np.int64) for side in (0, 1))
        return [int(one) for one in np.flatnonzero(((self.starts < last) & (self.stops > first)).all(axis=1))]


class ChunkedReader(Reader, Generic[Location]):
    """A checkpoint whose tensors are cut into chunks; `_chunks` has them by the tensor's name."""

    _chunks: dict[str, Chunks[Location]]

    @abc.abstractmethod
    def _stored(self, whole: Chunks[Location], number: int) -> OrderedTensor:
        """Return a chunk of a tensor."""

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor, from the chunks that hold them."""
        info = self.tensors[name]
        check_range(self.path, info, start, stop)
        if start == stop:
            return b""
        whole = self._chunks[name]
        if len(whole.items) == 1:
            return self._stored(whole, 0).read(start, stop)
        first, last = start // info.itemsize, -(-stop // info.itemsize)
        flat = np.empty(last - first, _bits(info.itemsize))
        self._fill(whole, first, flat)
        return flat.view(np.uint8)[start - first * info.itemsize : stop - first * info.itemsize].data

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into `into`."""
        info, whole = self.tensors[name], self._chunks[name]
        check_range(self.path, info, start, start + len(into))
        if len(whole.items) == 1 or not into or start % info.itemsize or len(into) % info.itemsize:
            super().read_into(name, start, into)
            return
        self._fill(whole, start // info.itemsize, np.frombuffer(into, np.uint8).view(_bits(info.itemsize)))

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix; if its rows are rows of the tensor, only the needed part of each chunk is read."""
        location = rows_as_region(self.tensors[name].shape, start, step, *into.shape)
        if location is None:
            super().read_rows(name, start, step, into)
            return
        region, axis, (rows, _) = location
        done, column = 0, start % step
        for box in boxes(self.tensors[name].shape[axis:], column, column + into.shape[1]):
            inner = [(part.start, part.stop) for part in box]
            inner += region[axis + len(inner) :]  # from the second axis of a row on, its region is all of it
            bounds = [*region[:axis], *inner]
            block = np.empty([last - first for first, last in bounds], _bits(into.itemsize))
            self._fill_box(self._chunks[name], bounds, block)
            matrix = block.reshape(-1, math.prod(block.shape[axis:]))[rows]
            into.view(block.dtype)[:, done : done + matrix.shape[1]] = matrix
            done += matrix.shape[1]

    def _fill(self, whole: Chunks[Location], first: int, flat: Array) -> None:
        """Read elements from `first` on, in C order."""
        done = 0
        for box in boxes(whole.info.shape, first, first + flat.size):
            bounds = [(part.start, part.stop) for part in box]
            bounds += [(0, size) for size in whole.info.shape[len(bounds) :]]
            sizes = [last - first for first, last in bounds]
            count = math.prod(sizes)
            self._fill_box(whole, bounds, flat[done : done + count].reshape(sizes))
            done += count

    def _fill_box(self, whole: Chunks[Location], box: Box, into: Array) -> None:
        for number in whole.overlapping(box):
            begin = whole.starts[number].tolist()
            part = [
                (max(first, start), min(last, stop))
                for (first, last), start, stop in zip(box, begin, whole.stops[number].tolist(), strict=True)
            ]
            window = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(part, box, strict=True))
            sizes = (whole.stops[number] - whole.starts[number]).tolist()
            chunk_box = [(low - start, high - start) for (low, high), start in zip(part, begin, strict=True)]
            _read_box(self._stored(whole, number), sizes, chunk_box, into[window])


def check_filled(path: Path, made: Chunks[Location]) -> None:
    """Refuse chunks that overlap or leave holes.

    The mixed differences of the coverage count are +1 or -1 at the corners of each chunk, and 0 elsewhere. The chunks
    fill the tensor exactly if the sum of their corners equals the corners of the whole.
    """
    label, shape = printable(made.info.name), made.info.shape
    if not made.items:
        raise bad(path, f"{label} has no chunks")
    if len(made.items) == 1 and not shape:
        return
    # Axes along which every chunk is whole have the same two corners for all: leaving them out halves the corners each
    # time.
    cut = [axis for axis, size in enumerate(shape) if (made.stops[:, axis] - made.starts[:, axis] != size).any()]
    if not cut and len(made.items) == 1:
        return
    if len(made.items) << len(cut) > MAX_CORNERS:
        raise bad(path, f"{label} has {len(made.items)} chunks along {len(cut)} axes, which are too many")
    signs: dict[tuple[int, ...], int] = {}
    rows = zip(made.starts[:, cut].tolist(), made.stops[:, cut].tolist(), strict=True)
    whole = ([0] * len(cut), [shape[axis] for axis in cut])
    for sign, (starts, stops) in itertools.chain(((1, one) for one in rows), [(-1, whole)]):
        for corner in itertools.product(*zip(starts, stops, strict=True)):
            upper = sum(at == stop for at, stop in zip(corner, stops, strict=True))
            count = signs.get(corner, 0) + sign * (-1) ** upper
            if count:
                signs[corner] = count
            else:
                del signs[corner]
    if signs:
        total = int((made.stops - made.starts).prod(axis=1, dtype=object).sum())
        how = f"hold {total} elements of {math.prod(shape)}" if total != math.prod(shape) else "overlap and leave holes"
        raise bad(path, f"the chunks of {label} do not fill it: they {how}")


def _bits(itemsize: int) -> np.dtype:
    """Return a dtype of that size whose elements are copied as they are."""
    return np.dtype(f"u{itemsize}" if itemsize <= 8 else "c16")


def _read_box(stored: OrderedTensor, shape: Sequence[int], box: Box, into: Array) -> None:
    """Read a box of a tensor: at once where its elements lie close to each other, or else row by row."""
    width, strides = into.itemsize, c_strides(shape)
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    span = extent(into.shape, strides)
    rows = next((axis for axis, size in enumerate(into.shape) if size > 1), None)
    is_whole = rows is None or span == into.size
    if is_whole or _is_dense(into.shape[rows:], strides[rows:], width):
        data = np.frombuffer(stored.read(first * width, (first + span) * width), into.dtype)
        steps = [stride * width for stride in strides]
        into[...] = np.lib.stride_tricks.as_strided(data, into.shape, steps, writeable=False)
        return
    assert rows is not None
    for number in range(into.shape[rows]):
        window = (slice(None),) * rows + (slice(number, number + 1),)
        start = box[rows][0] + number
        _read_box(stored, shape, [*box[:rows], (start, start + 1), *box[rows + 1 :]], into[window])


def _is_dense(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Return whether the gaps between elements are small enough to be read along."""
    span, run = extent(shape, strides), extent(shape[1:], strides[1:])
    return span <= SPARSE * math.prod(shape) and span * width <= MAX_SPAN and (strides[0] - run) * width < GAP
