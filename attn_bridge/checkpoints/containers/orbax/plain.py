"""Shared by reading and writing folders of Orbax: arrays with uncompressed chunks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EXTRA = "attn_bridge.json"
"""File with the metadata, which Orbax does not look at; written where there is some."""

FOREIGN = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"}
)
"""Names of dtypes that TensorStore adds to those of Zarr."""


@dataclasses.dataclass(frozen=True)
class PlainArray:
    """An array with uncompressed chunks in C order.

    Attributes:
        folder: folder of the array, with a file per chunk; unused in OCDBT.
        shape: its shape.
        chunks: the shape of its chunks.
        size: bytes of a chunk, including the padding of those at the edges.
    """

    folder: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    size: int

    def names(self) -> Iterator[str]:
        """Yield the names of all chunks, in the order of their elements."""
        counts = [range(-(-size // chunk)) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        for index in itertools.product(*counts):
            yield ".".join(map(str, index)) or "0"


def chunk_ranges(plain: PlainArray, start: int, stop: int) -> list[tuple[str, int, int]]:
    """Return which bytes of which chunks are bytes ``start:stop`` of an array, in their order."""
    if not plain.shape:
        return [("0", start, stop)]
    # Chunks are cut along this axis alone: in front of it they are one element long, and behind it axes are whole.
    split = next((axis for axis, size in enumerate(plain.chunks) if size > 1), len(plain.chunks) - 1)
    item = plain.size // math.prod(plain.chunks)
    row = math.prod(plain.shape[split + 1 :]) * item
    block = plain.shape[split] * row
    ranges = []
    while start < stop:
        outer, within = divmod(start, block)
        number, offset = divmod(within, plain.chunks[split] * row)
        end = min(stop, outer * block + min((number + 1) * plain.chunks[split] * row, block))
        index = [int(one) for one in np.unravel_index(outer, plain.shape[:split])] if split else []
        name = ".".join(str(one) for one in (*index, number, *[0] * (len(plain.shape) - split - 1)))
        ranges.append((name, offset, offset + end - start))
        start = end
    return ranges
