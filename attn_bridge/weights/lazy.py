"""An array of which any region can be read without the rest: what devices take their parts of it from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

Region = tuple[tuple[int, int], ...]
"""Where a part of an array begins and ends along each of its axes."""


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array that is read when it is asked for.

    Attributes:
        shape: of all of it.
        dtype: of its elements.
        read: gives a region of it in C order, in memory that is nobody else's.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Region], np.ndarray[Any, Any]]


def everything(shape: tuple[int, ...]) -> Region:
    """Return the region that is all of an array."""
    return tuple((0, size) for size in shape)


def slices(region: Region) -> tuple[slice, ...]:
    """Return a region as an index."""
    return tuple(slice(*bounds) for bounds in region)
