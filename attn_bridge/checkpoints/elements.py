"""Reads the elements of a target tensor from the source according to the plan: all of them, or a range at a time.

`Ahead` requests from a store the data that a worker reads next while it writes, with many requests at a time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..weights import LazyArray, Region, slices
from ..weights.placements import Steps, rounded, wider
from .containers.base import Reader, numpy_dtype
from .containers.writing import PAGE
from .copying import Move, apply, blocks, boxed, move_of, pieces, source_runs
from .planning import part_of

if TYPE_CHECKING:
    from .planning.plans import TargetTensor

Array = np.ndarray

MAX_FREE = 3
"""Number of released buffers kept for reuse."""

BLOCK = 1 << 17
"""Elements that are changed at a time."""

DENSE = 1.5
"""A box is read at once if the bytes between its first and last element are at most this many times its own size."""


class Elements:
    """Reads the elements of target tensors.

    Args:
        reader: the source.
        kept: tensors that an earlier conversion kept aside.
        most: largest source tensor that is loaded whole, in bytes.
    """

    def __init__(self, reader: Reader, kept: Reader | None, most: int):
        self._reader, self._kept, self._most = reader, kept, most
        self._held: tuple[str, Array] | None = None
        self._band: tuple[tuple[str, int, int], list[tuple[Array | None, Move]]] | None = None
        self._source = np.empty(0, np.uint8)
        self._free: list[Array] = []
        self._lent: dict[int, Array] = {}

    def release(self, array: Array) -> None:
        """Take back an array returned by `read`, so that its memory is reused; fresh memory is slow."""
        memory = self._lent.pop(_address(array), None)
        if memory is not None and len(self._free) < MAX_FREE:
            self._free.append(memory)

    def _take(self, count: int, dtype: np.dtype, file_offset: int) -> Array:
        """Return memory aligned within its page like byte `file_offset` of a file, so that direct I/O can write it."""
        size = count * dtype.itemsize
        fitting = [one for one in self._free if one.nbytes >= size + PAGE]
        memory = min(fitting, key=lambda buffer: buffer.nbytes) if fitting else None
        if memory is None:
            if self._free:
                self._free.pop(0)
            memory = np.empty(size + PAGE, np.uint8)
        else:
            self._free = [one for one in self._free if one is not memory]
        first = 0 if not size or file_offset % dtype.itemsize else (file_offset - _address(memory)) % PAGE
        self._lent[_address(memory) + first] = memory
        return memory[first : first + size].view(dtype)

    def read(
        self,
        target: TargetTensor,
        start: int = 0,
        stop: int | None = None,
        *,
        file_offset: int = 0,
        within: tuple[int, int] | None = None,
    ) -> tuple[Array, int]:
        """Return elements ``start:stop`` of a target in C order, and how many of them a cast changed.

        Args:
            target: the target tensor.
            start: the first element.
            stop: the end, exclusive; None for all.
            file_offset: their byte offset in the target file, if available.
            within: a larger range that is read in consecutive pieces like this one: short runs of the source are read
                once for all of these pieces.
        """
        stop = target.info.nbytes // target.info.itemsize if stop is None else stop
        reader = self._kept if target.kept and self._kept is not None else self._reader
        dtype = numpy_dtype(target.source_dtype)
        if len(target.moves) == 1 and target.moves[0].is_plain:
            move = target.moves[0]
            array = self._take(stop - start, dtype, file_offset)
            _read_into(reader, move.source, move.source_offset + start, array)
        else:
            array = self._take(stop - start, dtype, file_offset)
            for source, move in self._ready(reader, target, dtype, within):
                for piece in pieces(move, start, stop):
                    if source is None:
                        self._gather(reader, piece, array, start)
                    else:
                        apply(Move("", piece.source_offset, piece.target_offset - start, piece.axes), source, array)
        if target.is_changed:
            scaled = self._changed(target, array, start, stop)
            self.release(array)
            return scaled, 0
        if target.info.dtype == target.source_dtype:
            return array, 0
        cast = rounded(array, numpy_dtype(target.info.dtype))
        same = (cast.astype(dtype) == array) | (array != array)
        changed = int(array.size - np.count_nonzero(same))
        self.release(array)
        return cast, changed

    def _changed(self, target: TargetTensor, array: Array, start: int, stop: int) -> Array:
        """Return the target's numbers computed from the source's by the steps of each move.

        Where an earlier conversion kept the numbers before its change, and they still lead to the current ones, those
        are restored.
        """
        dtype = numpy_dtype(target.info.dtype)
        work = wider(array.dtype, dtype)
        result = array.astype(work)
        for move in target.moves:
            kept = None
            if move.original is not None and self._kept is not None:
                own = numpy_dtype(self._kept.tensors[move.original.source].dtype)
                kept = np.empty(array.size, own)
                for piece in pieces(move.original, start, stop):
                    self._gather(self._kept, piece, kept, start)
            for piece in pieces(move, start, stop) if move.steps else ():
                moved = Move(piece.source, 0, piece.target_offset - start, piece.axes)
                result_view, array_view = boxed(moved, result), boxed(moved, array)
                kept_view = None if kept is None else boxed(moved, kept)
                for at in blocks([size for size, _, _ in moved.axes], BLOCK):
                    _change(move.steps, result_view[at], array_view[at], None if kept_view is None else kept_view[at])
        return rounded(result, dtype)

    def needed(self, target: TargetTensor, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Return the byte ranges of source tensors to read for elements ``start:stop``, omitting scattered ones.

        Returns:
            (name, start, stop) for each range of bytes.
        """
        if target.kept and self._kept is not None:
            return []
        ranges = []
        for piece in (piece for move in target.moves for piece in pieces(move, start, stop)):
            info = self._reader.tensors[piece.source]
            extent = 1 + sum((size - 1) * here for size, here, _ in piece.axes)
            if extent <= DENSE * piece.size:
                first = piece.source_offset * info.itemsize
                ranges.append((piece.source, first, first + extent * info.itemsize))
            elif info.nbytes <= self._most:
                ranges.append((piece.source, 0, info.nbytes))
        return ranges

    def read_plain(self, target: TargetTensor, into: Array) -> None:
        """Read a whole target, whose elements are contiguous and of one dtype in a source tensor, into `into`."""
        (move,) = target.moves
        _read_into(self._reader, move.source, move.source_offset, into)

    def _gather(self, reader: Reader, piece: Move, into: Array, base: int) -> None:
        moved = Move(piece.source, 0, piece.target_offset - base, piece.axes)
        first = piece.source_offset
        extent = 1 + sum((size - 1) * here for size, here, _ in piece.axes)
        info = reader.tensors[piece.source]
        if extent <= DENSE * piece.size:
            source = self._room(extent, into.dtype)
            _read_into(reader, piece.source, first, source)
            apply(moved, source, into)
            return
        if info.nbytes <= self._most:
            if self._held is None or self._held[0] != piece.source:
                self._held = None  # freed before the next is read
                size = info.nbytes // info.itemsize
                self._held = piece.source, _range(reader, piece.source, 0, size, into.dtype)
            apply(Move(piece.source, first, moved.target_offset, piece.axes), self._held[1], into)
            return
        source = self._room(piece.size, into.dtype)
        gathered = self._in_runs(reader, piece, source)
        apply(dataclasses.replace(gathered, target_offset=moved.target_offset), source, into)

    def _ready(
        self, reader: Reader, target: TargetTensor, dtype: np.dtype, within: tuple[int, int] | None
    ) -> list[tuple[Array | None, Move]]:
        """Return the moves of a target; those of short runs read from memory that already contains the whole range."""
        if within is None:
            return [(None, move) for move in target.moves]
        key = target.info.name, *within
        if self._band is None or self._band[0] != key:
            self._band = None  # freed before the next is read
            moves: list[tuple[Array | None, Move]] = []
            for piece in (piece for move in target.moves for piece in pieces(move, *within)):
                extent = 1 + sum((size - 1) * here for size, here, _ in piece.axes)
                if extent <= DENSE * piece.size or reader.tensors[piece.source].nbytes <= self._most:
                    moves.append((None, piece))
                else:
                    self._held, self._source = None, np.empty(0, np.uint8)  # of the tensor before
                    source = np.empty(piece.size, dtype)
                    moves.append((source, self._in_runs(reader, piece, source)))
            self._band = key, moves
        return self._band[1]

    @staticmethod
    def _in_runs(reader: Reader, piece: Move, source: Array) -> Move:
        """Read run by run into memory without gaps, and return the move from there to the target."""
        first = piece.source_offset
        run, around = source_runs(piece)
        inside = sorted((axis for axis in piece.axes if axis not in around), key=lambda axis: -axis[1])
        outer, (rows, between) = (around[:-1], around[-1][:2]) if around else ([], (1, run))
        position = 0
        for index in np.ndindex(*(size for size, _, _ in outer)):
            offset = first + sum(at * axis[1] for at, axis in zip(index, outer, strict=True))
            reader.read_rows(piece.source, offset, between, source[position : position + rows * run].reshape(rows, run))
            position += rows * run
        step, dense = 1, []
        for size, _, target_stride in reversed([*around, *inside]):
            dense.append((size, step, target_stride))
            step *= size
        return move_of(piece.source, 0, piece.target_offset, dense)

    def _room(self, count: int, dtype: np.dtype) -> Array:
        """Return scratch memory, valid until the next call."""
        size = count * dtype.itemsize
        if self._source.nbytes < size:
            self._source = np.empty(0, np.uint8)  # freed before there is a larger one
            self._source = np.empty(size, np.uint8)
        return self._source[:size].view(dtype)


class Parts:
    """Reads regions of targets, and of a random-access source only the elements needed where `part_of` can cut them.

    Args:
        reader: the source.
        kept: tensors that an earlier conversion kept aside.
    """

    def __init__(self, reader: Reader, kept: Reader | None):
        self._reader, self._kept = reader, kept
        self._held: tuple[str, Array] | None = None

    def of(self, target: TargetTensor) -> LazyArray:
        """Return a target as an array that reads regions on demand."""
        dtype = numpy_dtype(target.info.dtype)
        return LazyArray(target.info.shape, dtype, lambda region: self._read(target, region))

    def _read(self, target: TargetTensor, region: Region) -> Array:
        part = part_of(target, region) if self._reader.random_access else None
        if part is not None:
            # A separate reader, since this caller keeps the memory that it lends.
            return Elements(self._reader, self._kept, 0).read(part)[0].reshape(part.info.shape)
        name, shape = target.info.name, target.info.shape
        if self._held is None or self._held[0] != name:
            self._held = None  # freed before the next is read
            self._held = name, Elements(self._reader, self._kept, target.info.nbytes).read(target)[0].reshape(shape)
        return np.array(self._held[1][slices(region)], order="C")


def _change(steps: Steps, result: Array, array: Array, kept: Array | None) -> None:
    """Apply steps to numbers; restore the kept numbers wherever they lead to `array` bit for bit."""
    values = steps.apply(np.ascontiguousarray(result))
    if kept is not None:
        before = np.ascontiguousarray(kept)
        again = rounded(steps.turned.apply(before.astype(wider(before.dtype, array.dtype))), array.dtype)
        bits = f"u{array.itemsize}"
        same = again.view(bits) == np.ascontiguousarray(array).view(bits)
        values = np.where(same, rounded(before, values.dtype), values)
    result[...] = values


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _range(reader: Reader, name: str, start: int, stop: int, dtype: np.dtype) -> Array:
    data = reader.read_range(name, start * dtype.itemsize, stop * dtype.itemsize)
    return np.frombuffer(data, dtype)


def _read_into(reader: Reader, name: str, start: int, into: Array) -> None:
    if into.size:
        reader.read_into(name, start * into.dtype.itemsize, into.view(np.uint8).data)


WINDOW, LEAST_WINDOW = 1 << 25, 1 << 24
"""Maximum bytes requested ahead of use; the second is for small tasks."""

BATCH = 1 << 22
"""Bytes requested together, at least, if that many are needed: neighbouring ranges share a request."""

CHUNK_AHEAD = 1 << 23
"""Maximum bytes that a worker moves at a time, so that several chunks fit in the read-ahead window."""

MOST_AHEAD = 256
"""Maximum number of ranges of elements to look ahead."""


class Ahead:
    """Starts the reads of a store that a worker needs next.

    Args:
        reader: the source.
        elements: reads from the source.
        work: targets, and ranges of their elements, in the order in which they will be read.
        task_bytes: maximum bytes of a task.
    """

    def __init__(
        self, reader: Reader, elements: Elements, work: Iterable[tuple[TargetTensor, int, int]], task_bytes: int
    ):
        self._reader, self._elements = reader, elements
        self._work = iter(work)
        self._window = min(WINDOW, max(LEAST_WINDOW, task_bytes))
        self._asked: collections.deque[int] = collections.deque()
        self._last: tuple[str, int, int] | None = None
        self._done = False

    def go_on(self) -> None:
        """Request the next ranges, once the window has room."""
        num_bytes = sum(self._asked)
        while not self._done and num_bytes + BATCH <= self._window and len(self._asked) < MOST_AHEAD:
            batch: list[tuple[str, int, int]] = []
            size = 0
            while size < BATCH and len(self._asked) < MOST_AHEAD:
                item = next(self._work, None)
                if item is None:
                    self._done = True
                    break
                ranges = [one for one in self._elements.needed(*item) if one != self._last]
                self._last = ranges[-1] if ranges else self._last
                count = sum(stop - start for _, start, stop in ranges)
                if count > self._window:  # such a large read is spread over connections anyway
                    ranges, count = [], 0
                batch += ranges
                size += count
                self._asked.append(count)
            num_bytes += size
            if batch:
                self._reader.read_ahead(batch)

    def taken(self) -> None:
        """Count the next range as read."""
        if self._asked:
            self._asked.popleft()
