"""Moving the elements of tensors from one memory order to another, fast and a piece at a time.

A `Move` is a box of elements with two strides for each axis, in the source and in the target: transposing, splitting,
fusing and stacking are all boxes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backends import usable_cores
from ..weights.placements import NO_STEPS, Steps
from .containers.writing import Threads

Array = np.ndarray
Axis = tuple[int, int, int]
"""(size, stride in the source, stride in the target), in elements."""

LINE = 64
"""Bytes of a cache line."""

WORD = 8
"""Bytes of the widest numbers that narrower elements are packed in."""

COLUMNS = 4096
"""Columns that are packed at a time, so that they stay in the second-level cache."""

ROWS = 16
"""Rows that are transposed at a time where they can't be packed."""

LINES = 4
"""Cache lines of the target that rows are packed for, so that its pages are touched few times."""

_WIDER: dict[int, Any] = {1: np.uint16, 2: np.uint32, 4: np.uint64}

WORTH_THREADS = 1 << 20
"""Bytes from which on a copy is cut for several threads."""


@dataclasses.dataclass(frozen=True)
class Move:
    """A box of elements in a source tensor, and its position in a target tensor.

    Attributes:
        source: name of the source tensor.
        source_offset: index of the first element in the source.
        target_offset: index of the first element in the target.
        axes: axes of the box, outermost in the target first.
        steps: arithmetic that the conversion applies to the elements.
        original: the box with the target's numbers as they were before an earlier conversion applied the inverse steps.
    """

    source: str
    source_offset: int
    target_offset: int
    axes: tuple[Axis, ...]
    steps: Steps = NO_STEPS
    original: Move | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(size for size, _, _ in self.axes)

    @property
    def is_plain(self) -> bool:
        """Whether the elements are in the same order on both sides, without gaps."""
        if self.steps:
            return False
        step = 1
        for size, source, target in reversed(self.axes):
            if (source, target) != (step, step):
                return False
            step *= size
        return True


def move_of(source: str, source_offset: int, target_offset: int, axes: list[Axis]) -> Move:
    """Return the move with its axes in the target's order, those that belong together merged."""
    ordered = sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: -axis[2])
    merged: list[Axis] = []
    for size, source_stride, target_stride in ordered:
        if merged and merged[-1][1] == source_stride * size and merged[-1][2] == target_stride * size:
            merged[-1] = merged[-1][0] * size, source_stride, target_stride
        else:
            merged.append((size, source_stride, target_stride))
    return Move(source, source_offset, target_offset, tuple(merged))


def apply(move: Move, source: Array, target: Array) -> None:
    """Move the elements between two flat arrays of one dtype."""
    if not move.size:
        return
    shape = [size for size, _, _ in move.axes]
    width = source.itemsize
    if width <= 8:  # bits, whatever they mean
        source, target = source.view(f"u{width}"), target.view(f"u{width}")
    source_view = np.lib.stride_tricks.as_strided(
        source[move.source_offset :], shape, [here * width for _, here, _ in move.axes], writeable=False
    )
    target_view = np.lib.stride_tricks.as_strided(
        target[move.target_offset :], shape, [there * width for _, _, there in move.axes]
    )
    copy(source_view, target_view)


def copy(source: Array, target: Array) -> None:
    """Copy between arrays of one shape and any strides, target axes outermost first."""
    if source.nbytes < WORTH_THREADS or source.ndim == 0 or _threads() == 1:
        _copy_tiles(source, target)
        return
    axis, cuts = _cuts(source)
    jobs = []
    for start, stop in itertools.pairwise(cuts):
        region = (*([slice(None)] * axis), slice(start, stop))
        jobs.append(_pool().submit(_copy_tiles, source[region], target[region]))
    for job in jobs:
        job.result()


def _cuts(source: Array) -> tuple[int, list[int]]:
    """Return the axis that is cut for the threads, and where: between packed rows where it can be."""
    count, last = _threads(), source.ndim - 1
    panel = LINES * LINE // source.itemsize
    panels = source.shape[last] // panel
    if _fast_axis(source) != last and panels >= 4 * count:
        return last, [number * panels // count * panel for number in range(count)] + [source.shape[last]]
    axis = max(range(source.ndim), key=lambda axis: (axis != last or not last, source.shape[axis]))
    return axis, [number * source.shape[axis] // count for number in range(count + 1)]


def _fast_axis(source: Array) -> int:
    return int(np.argmin(np.abs(source.strides)))


def _copy_tiles(source: Array, target: Array) -> None:
    """Copy, and transpose where the axis that is fastest in the source is not the one that is fastest in the target."""
    last = source.ndim - 1
    fast = _fast_axis(source) if source.ndim else last
    if fast == last:
        np.copyto(target, source)
        return
    for outer in np.ndindex(*(size for axis, size in enumerate(source.shape) if axis not in (fast, last))):
        rest = iter(outer)
        region = tuple([slice(None) if axis in (fast, last) else next(rest) for axis in range(source.ndim)])
        _transpose(source[region].T, target[region])


def _transpose(source: Array, target: Array) -> None:
    """Transpose a matrix, a few cache lines of the target at a time.

    NumPy moves element by element, so narrow ones are packed first: rows become the halves of words twice as wide,
    which whole rows do at once.
    """
    width, height = source.itemsize, source.shape[0]
    is_packed = width in _WIDER and source.strides[1] == width == target.strides[1]
    rows = LINES * LINE // width
    done = height - height % (WORD // width) if is_packed else 0
    for row in range(0, done, rows):
        stop = min(done, row + rows)
        for column in range(0, source.shape[1], COLUMNS):
            words = source[row:stop, column : column + COLUMNS]
            while words.itemsize < WORD:
                words = _packed(words)
            target[column : column + COLUMNS, row:stop].view(np.uint64)[...] = words.T
    for row in range(done, height, ROWS):
        target[:, row : row + ROWS] = source[row : row + ROWS].T


_scratch = threading.local()


def _packed(words: Array) -> Array:
    """Return every other row as the low half of words twice as wide, and the rows after them as the high half."""
    height, columns = words.shape[0] // 2, words.shape[1]
    kind = _WIDER[words.itemsize]
    stride = columns + LINE // WORD  # rows a power of two apart would share a few lines of the cache
    kept = _scratch.__dict__
    if kind not in kept or kept[kind].size < height * stride:  # fresh memory costs more than the work
        kept[kind] = np.empty(height * stride, kind)
    pairs: Array = kept[kind][: height * stride].reshape(height, stride)[:, :columns]
    np.copyto(pairs, words[0::2])
    np.copyto(pairs.view(words.dtype)[:, 1::2], words[1::2])
    return pairs


def dense(shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Return the axes of a placement that takes up a whole tensor in order."""
    strides: list[tuple[tuple[int, int], ...]] = []
    step = 1
    for size in reversed(shape):
        strides.append(((size, step),))
        step *= size
    return strides[::-1]


def boxed(move: Move, target: Array) -> Array:
    """Return a view of the elements that a move writes in a flat array."""
    steps = [there * target.itemsize for _, _, there in move.axes]
    return np.lib.stride_tricks.as_strided(target[move.target_offset :], [size for size, _, _ in move.axes], steps)


def blocks(shape: list[int], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices that cut an array into blocks of about `most` elements."""
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield ()
        return
    rows = max(1, most // inner)
    for outer in np.ndindex(*shape[: axis - 1]):
        for start in range(0, shape[axis - 1], rows):
            yield (*outer, slice(start, start + rows))


def pieces(move: Move, start: int, stop: int) -> Iterator[Move]:
    """Yield the parts of a move that go to the target's elements ``start:stop``."""
    yield from _pieces(move.source, move.source_offset, move.target_offset, move.axes, start, stop)


def _pieces(
    source: str, from_offset: int, to_offset: int, axes: tuple[Axis, ...], start: int, stop: int
) -> Iterator[Move]:
    reach = sum((size - 1) * step for size, _, step in axes)
    if to_offset >= stop or to_offset + reach < start:
        return
    if start <= to_offset and to_offset + reach < stop:
        yield Move(source, from_offset, to_offset, axes)
        return
    (size, from_step, to_step), rest = axes[0], axes[1:]
    inner = sum((one - 1) * step for one, _, step in rest)
    first = max(0, -((to_offset - start) // to_step) if to_offset < start else 0)  # the first that begins inside
    last = min(size, (stop - 1 - inner - to_offset) // to_step + 1)  # the first that no longer ends inside
    if last > first:
        kept = ((last - first, from_step, to_step), *rest)
        yield Move(source, from_offset + first * from_step, to_offset + first * to_step, kept)
    for index in (
        *range(max(0, first - 1), min(first, size)),
        *range(max(last, first), min(size, max(last, first) + 1)),
    ):
        yield from _pieces(source, from_offset + index * from_step, to_offset + index * to_step, rest, start, stop)


def source_runs(move: Move) -> tuple[int, list[Axis]]:
    """Return the length of contiguous runs in the source, in elements, and the axes around such runs."""
    ordered = sorted(move.axes, key=lambda axis: axis[1])
    run = 1
    while ordered and ordered[0][1] == run:
        run *= ordered.pop(0)[0]
    return run, ordered[::-1]


_processes = [1]


@contextlib.contextmanager
def beside(processes: int) -> Iterator[None]:
    """Copy with fewer threads while `processes` processes share the cores."""
    _processes.append(max(1, processes))
    try:
        yield
    finally:
        _processes.pop()


def _threads() -> int:
    """Return how many threads copy: as many as there are cores, since those that hash and write wait at times."""
    return max(1, min(usable_cores() // _processes[-1], 8))


@functools.cache
def _pool() -> Threads:
    return Threads(max(1, min(usable_cores(), 8)), "copy")
