"""Tiles of a tensor, which locate a difference: each has a separate digest, independent of how the tensor was read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...weights import Region, slices
from ..containers.base import Array
from ..copying import Move, blocks
from ..manifest import new_digest

PIECE = 8 << 20
"""Maximum bytes of a tensor in memory at a time."""

# 64 tiles of one axis, 16**2 = 256 of two, 8**3 = 512 of three, and 4**4 = 256 of four.
COUNTS = (1, 64, 16, 8)
"""Maximum tiles along each axis, by the number of axes longer than 1; with more axes, it is `FEW`."""
FEW = 4

SHORT = 16
"""Digits of a tile's digest: it locates differences that the whole digests have already shown."""

MOST_AXES = 4
"""Axes that are cut into tiles, at most: the longest ones."""


def steps(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the size of a tile along each axis; it follows from the shape alone."""
    cut = sorted((axis for axis, size in enumerate(shape) if size > 1), key=lambda axis: -shape[axis])[:MOST_AXES]
    count = COUNTS[len(cut)] if len(cut) < len(COUNTS) else FEW
    return tuple(-(-size // count) if axis in cut else max(size, 1) for axis, size in enumerate(shape))


def regions(shape: Sequence[int]) -> list[Region]:
    """Return all tiles of a tensor, in C order."""
    return [tuple(one) for one in itertools.product(*_bounds(shape))]


def _bounds(shape: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return where tiles begin and end along each axis."""
    return [
        [(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, steps(shape), strict=True)
    ]


def boxes(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int, Region]]:
    """Cut a tensor into contiguous boxes of at most `PIECE` bytes.

    Yields:
        Its first element, its end (exclusive), and the box, which may span tiles.
    """
    start = 0
    for index in blocks(list(shape), max(PIECE // itemsize, 1)) if math.prod(shape) else ():
        cut = [at if isinstance(at, slice) else slice(at, at + 1) for at in index]
        box = [(at.start, min(at.stop, size)) for at, size in zip(cut, shape, strict=False)]
        box += [(0, size) for size in shape[len(box) :]]
        stop = start + math.prod(last - first for first, last in box)
        yield start, stop, tuple(box)
        start = stop


class TiledDigest:
    """Digests of a tensor and of its tiles, fed box by box in the order of `boxes`.

    Args:
        shape: of the tensor.
    """

    def __init__(self, shape: Sequence[int]):
        self._bounds, self._steps = _bounds(shape), steps(shape)
        self._whole = new_digest()
        self._tiles = {at: new_digest() for at in itertools.product(*(range(len(one)) for one in self._bounds))}

    def update(self, box: Region, array: Array) -> None:
        """Feed the elements of a box, in C order."""
        array = np.ascontiguousarray(array).reshape([stop - start for start, stop in box])
        self._whole.update(bytes_of(array))
        spans = [range(start // step, -(-stop // step)) for (start, stop), step in zip(box, self._steps, strict=True)]
        for at in itertools.product(*spans):
            part = [
                (max(bounds[index][0], start) - start, min(bounds[index][1], stop) - start)
                for index, bounds, (start, stop) in zip(at, self._bounds, box, strict=True)
            ]
            self._tiles[at].update(bytes_of(array[slices(tuple(part))]))

    def hexdigest(self) -> str:
        """Return the digest of all bytes."""
        return self._whole.hexdigest()

    def tiles(self) -> tuple[str, ...]:
        """Return the tiles' digests, in C order."""
        return tuple(one.hexdigest()[:SHORT] for one in self._tiles.values())


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of an array, in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def source_region(move: Move, shape: Sequence[int]) -> Region:
    """Return a box of a source tensor that contains all elements that a move reads from it."""
    begin, end = move.source_offset, move.source_offset + sum((size - 1) * step for size, step, _ in move.axes)
    region: list[tuple[int, int]] = []
    for size in reversed(shape):
        (begin, first), (end, last) = divmod(begin, size), divmod(end, size)
        region.insert(0, (first, last + 1))
    # Behind the first axis along which it ends after it begins, a move that runs on over whole rows takes all.
    if any(start >= stop for start, stop in region):
        at = next(axis for axis, (start, stop) in enumerate(region) if stop > start + 1)
        region = [*region[: at + 1], *((0, size) for size in shape[at + 1 :])]
    return tuple(region)
