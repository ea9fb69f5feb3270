"""The elements of a target tensor, read from the source as the plan says: whole, or a range at a time.

`Ahead` asks a store for what a worker reads next while it writes, many requests at a time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..weights import LazyArray, Region, slices
from ..weights.changes import Steps, rounded, wider
from .containers.base import Reader, numpy_dtype
from .containers.writing import PAGE
from .copying import Move, apply, blocks, boxed, move_of, pieces, source_runs
from .planning import part_of

if TYPE_CHECKING:
    from .planning.plans import Target

Array = np.ndarray[Any, Any]

MAX_FREE = 3
"""How many pieces of memory wait to be used again."""

BLOCK = 1 << 17
"""How many numbers are changed at a time."""

DENSE = 1.5
"""A box is read at once if the bytes between its first and last element are at most this many times its own."""


class Elements:
    """Reads what targets are made of.

    Args:
        reader: the source.
        kept: what an earlier conversion kept aside.
        most: largest source tensor that is held as a whole, in bytes.
    """

    def __init__(self, reader: Reader, kept: Reader | None, most: int):
        self._reader, self._kept, self._most = reader, kept, most
        self._held: tuple[str, Array] | None = None
        self._band: tuple[tuple[str, int, int], list[tuple[Array | None, Move]]] | None = None
        self._source = np.empty(0, np.uint8)
        self._free: list[Array] = []
        self._lent: dict[int, Array] = {}

    def release(self, array: Array) -> None:
        """Take an array back that `read` gave, for its memory to be used again; fresh memory is slow."""
        memory = self._lent.pop(_address(array), None)
        if memory is not None and len(self._free) < MAX_FREE:
            self._free.append(memory)

    def _take(self, count: int, dtype: np.dtype[Any], place: int) -> Array:
        """Return memory whose first byte lies in its page as byte `place` of a file does: it can go there directly."""
        size = count * dtype.itemsize
        fitting = [one for one in self._free if one.nbytes >= size + PAGE]
        memory = min(fitting, key=lambda one: one.nbytes) if fitting else None
        if memory is None:
            if self._free:
                self._free.pop(0)
            memory = np.empty(size + PAGE, np.uint8)
        else:
            self._free = [one for one in self._free if one is not memory]
        first = 0 if not size or place % dtype.itemsize else (place - _address(memory)) % PAGE
        self._lent[_address(memory) + first] = memory
        return memory[first : first + size].view(dtype)

    def read(
        self,
        target: Target,
        start: int = 0,
        stop: int | None = None,
        *,
        place: int = 0,
        within: tuple[int, int] | None = None,
    ) -> tuple[Array, int]:
        """Return elements ``start:stop`` of a target in C order, and how many of them a cast changed.

        Args:
            target: what they are elements of.
            start: the first.
            stop: the one behind the last.
            place: where in a file they will go, if that is known.
            within: a range around them that is read in pieces like this one, one after the other: what lies in short
                runs in the source is read once for all of them.
        """
        stop = target.info.nbytes // target.info.itemsize if stop is None else stop
        reader = self._kept if target.kept and self._kept is not None else self._reader
        dtype = numpy_dtype(target.source_dtype)
        if len(target.moves) == 1 and target.moves[0].is_plain:
            move = target.moves[0]
            found = self._take(stop - start, dtype, place)
            _read_into(reader, move.source, move.source_offset + start, found)
        else:
            found = self._take(stop - start, dtype, place)
            for source, move in self._ready(reader, target, dtype, within):
                for piece in pieces(move, start, stop):
                    if source is None:
                        self._gather(reader, piece, found, start)
                    else:
                        apply(Move("", piece.source_offset, piece.target_offset - start, piece.axes), source, found)
        if target.is_changed:
            scaled = self._changed(target, found, start, stop)
            self.release(found)
            return scaled, 0
        if target.info.dtype == target.source_dtype:
            return found, 0
        cast = rounded(found, numpy_dtype(target.info.dtype))
        same = (cast.astype(dtype) == found) | (found != found)
        changed = int(found.size - np.count_nonzero(same))
        self.release(found)
        return cast, changed

    def _changed(self, target: Target, found: Array, start: int, stop: int) -> Array:
        """Return the target's numbers of the source's.

        Where an earlier conversion kept what it changed, and that still leads to what is there now, it is taken back.
        """
        there = numpy_dtype(target.info.dtype)
        work = wider(found.dtype, there)
        result = found.astype(work)
        for move in target.moves:
            kept = None
            if move.original is not None and self._kept is not None:
                own = numpy_dtype(self._kept.tensors[move.original.source].dtype)
                kept = np.empty(found.size, own)
                for piece in pieces(move.original, start, stop):
                    self._gather(self._kept, piece, kept, start)
            for piece in pieces(move, start, stop) if move.steps else ():
                moved = Move(piece.source, 0, piece.target_offset - start, piece.axes)
                one, two = boxed(moved, result), boxed(moved, found)
                three = None if kept is None else boxed(moved, kept)
                for at in blocks([size for size, _, _ in moved.axes], BLOCK):
                    _change(move.steps, one[at], two[at], None if three is None else three[at])
        return rounded(result, there)

    def needed(self, target: Target, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Return which bytes of the source's tensors elements ``start:stop`` are read from, where those lie together.

        Returns:
            (name, start, stop) for each range of bytes.
        """
        if target.kept and self._kept is not None:
            return []
        found = []
        for piece in (piece for move in target.moves for piece in pieces(move, start, stop)):
            info = self._reader.tensors[piece.source]
            extent = 1 + sum((size - 1) * here for size, here, _ in piece.axes)
            if extent <= DENSE * piece.size:
                first = piece.source_offset * info.itemsize
                found.append((piece.source, first, first + extent * info.itemsize))
            elif info.nbytes <= self._most:
                found.append((piece.source, 0, info.nbytes))
        return found

    def read_plain(self, target: Target, into: Array) -> None:
        """Read a whole target, whose elements lie in one tensor in order and dtype, into memory that is there."""
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
        self, reader: Reader, target: Target, dtype: np.dtype[Any], within: tuple[int, int] | None
    ) -> list[tuple[Array | None, Move]]:
        """Return the moves of a target; those of short runs in a range as moves out of memory that holds them."""
        if within is None:
            return [(None, move) for move in target.moves]
        key = target.info.name, *within
        if self._band is None or self._band[0] != key:
            self._band = None  # freed before the next is read
            found: list[tuple[Array | None, Move]] = []
            for piece in (piece for move in target.moves for piece in pieces(move, *within)):
                extent = 1 + sum((size - 1) * here for size, here, _ in piece.axes)
                if extent <= DENSE * piece.size or reader.tensors[piece.source].nbytes <= self._most:
                    found.append((None, piece))
                else:
                    self._held, self._source = None, np.empty(0, np.uint8)  # of the tensor before
                    source = np.empty(piece.size, dtype)
                    found.append((source, self._in_runs(reader, piece, source)))
            self._band = key, found
        return self._band[1]

    @staticmethod
    def _in_runs(reader: Reader, piece: Move, source: Array) -> Move:
        """Read run by run into memory without gaps, and return the move from there to where all of it goes."""
        first = piece.source_offset
        run, around = source_runs(piece)
        inside = sorted((axis for axis in piece.axes if axis not in around), key=lambda axis: -axis[1])
        outer, (rows, between) = (around[:-1], around[-1][:2]) if around else ([], (1, run))
        position = 0
        for index in np.ndindex(*(size for size, _, _ in outer)):
            here = first + sum(at * axis[1] for at, axis in zip(index, outer, strict=True))
            reader.read_rows(piece.source, here, between, source[position : position + rows * run].reshape(rows, run))
            position += rows * run
        step, dense = 1, []
        for size, _, there in reversed([*around, *inside]):
            dense.append((size, step, there))
            step *= size
        return move_of(piece.source, 0, piece.target_offset, dense)

    def _room(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory for what is read and used at once."""
        size = count * dtype.itemsize
        if self._source.nbytes < size:
            self._source = np.empty(0, np.uint8)  # freed before there is a larger one
            self._source = np.empty(size, np.uint8)
        return self._source[:size].view(dtype)


class Parts:
    """Reads regions of targets, and of the source no more than they are made of, where that can be told.

    Args:
        reader: the source.
        kept: what an earlier conversion kept aside.
    """

    def __init__(self, reader: Reader, kept: Reader | None):
        self._reader, self._kept = reader, kept
        self._held: tuple[str, Array] | None = None

    def of(self, target: Target) -> LazyArray:
        """Return a target as an array that is read by regions."""
        dtype = numpy_dtype(target.info.dtype)
        return LazyArray(target.info.shape, dtype, lambda region: self._read(target, region))

    def _read(self, target: Target, region: Region) -> Array:
        part = part_of(target, region) if self._reader.random_access else None
        if part is not None:
            # Elements of its own: the memory that it lends is kept here.
            return Elements(self._reader, self._kept, 0).read(part)[0].reshape(part.info.shape)
        name, shape = target.info.name, target.info.shape
        if self._held is None or self._held[0] != name:
            self._held = None  # freed before the next is read
            self._held = name, Elements(self._reader, self._kept, target.info.nbytes).read(target)[0].reshape(shape)
        return np.array(self._held[1][slices(region)], order="C")


def _change(steps: Steps, result: Array, found: Array, kept: Array | None) -> None:
    """Change numbers, and take those of before the last change where they lead to the ones found, bit for bit."""
    values = steps.apply(np.ascontiguousarray(result))
    if kept is not None:
        before = np.ascontiguousarray(kept)
        again = rounded(steps.turned.apply(before.astype(wider(before.dtype, found.dtype))), found.dtype)
        bits = f"u{found.itemsize}"
        same = again.view(bits) == np.ascontiguousarray(found).view(bits)
        values = np.where(same, rounded(before, values.dtype), values)
    result[...] = values


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _range(reader: Reader, name: str, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
    data = reader.read_range(name, start * dtype.itemsize, stop * dtype.itemsize)
    return np.frombuffer(data, dtype)


def _read_into(reader: Reader, name: str, start: int, into: Array) -> None:
    if into.size:
        reader.read_into(name, start * into.dtype.itemsize, into.view(np.uint8).data)


WINDOW, LEAST_WINDOW = 1 << 25, 1 << 24
"""Bytes that are asked for before they are needed, at most, and where tasks are small."""

BATCH = 1 << 22
"""Bytes that are asked for together, at least, where so many are needed: neighbours by one request."""

CHUNK_AHEAD = 1 << 23
"""Bytes that a worker moves at a time, at most, so that several such pieces fit in what is asked for."""

MOST_AHEAD = 256
"""Pieces of work that are looked ahead, at most."""


class Ahead:
    """Starts the reads of a store that a worker needs next.

    Args:
        reader: the source.
        elements: what reads from it.
        work: targets, and ranges of their elements, in the order in which they will be read.
        task_bytes: bytes of a task, at most.
    """

    def __init__(self, reader: Reader, elements: Elements, work: Iterable[tuple[Target, int, int]], task_bytes: int):
        self._reader, self._elements = reader, elements
        self._work = iter(work)
        self._window = min(WINDOW, max(LEAST_WINDOW, task_bytes))
        self._asked: collections.deque[int] = collections.deque()
        self._last: tuple[str, int, int] | None = None
        self._done = False

    def go_on(self) -> None:
        """Ask for what there is room for, once there is room for some."""
        held = sum(self._asked)
        while not self._done and held + BATCH <= self._window and len(self._asked) < MOST_AHEAD:
            batch: list[tuple[str, int, int]] = []
            size = 0
            while size < BATCH and len(self._asked) < MOST_AHEAD:
                item = next(self._work, None)
                if item is None:
                    self._done = True
                    break
                found = [one for one in self._elements.needed(*item) if one != self._last]
                self._last = found[-1] if found else self._last
                count = sum(stop - start for _, start, stop in found)
                if count > self._window:  # as large as that, it is spread over connections by itself
                    found, count = [], 0
                batch += found
                size += count
                self._asked.append(count)
            held += size
            if batch:
                self._reader.read_ahead(batch)

    def taken(self) -> None:
        """Say that the next piece of work was read."""
        if self._asked:
            self._asked.popleft()
