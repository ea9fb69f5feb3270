"""An array with reads by region, from which devices load their shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

Region = tuple[tuple[int, int], ...]
"""Start and end (exclusive) of a part of an array along each of its axes."""


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array that is read on demand.

    Attributes:
        shape: of the whole array.
        dtype: of its elements.
        read: returns a region of it in C order, in memory that belongs to the caller.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Region], np.ndarray]


def everything(shape: tuple[int, ...]) -> Region:
    """Return the region that is all of an array."""
    return tuple((0, size) for size in shape)


def slices(region: Region) -> tuple[slice, ...]:
    """Return a region as an index."""
    return tuple(slice(*bounds) for bounds in region)


def overlap(first: Region, second: Region) -> Region | None:
    """Return the intersection of two regions, or None."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in common) else common
