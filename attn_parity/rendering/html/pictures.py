"""Tensors as small pictures: two sides and their difference as heat maps, and their rounding errors as a histogram."""

from __future__ import annotations

import base64
import functools
import itertools
import struct
import zlib
from typing import Any

import ml_dtypes
import numpy as np

from ...results.findings import Array

CELLS = 64
"""Most cells along an edge; a larger tensor shows the most extreme element of each block."""

HEADS = 12
"""Most heads of which attention weights are drawn."""

NOT_FINITE = 255
"""Palette entry of infinities and NaNs; the others run from the smallest value to the largest."""

_VIRIDIS = "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"
_BLUE_RED = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"
_MAGENTA = (255, 0, 255)
_LOWEST, _HIGHEST = -8, 24
"""Exponents of two between which errors are distinguished."""


# ---- heat maps


def matrix(array: Array) -> Array:
    """Return an array as a matrix: a vector as one row, more axes split where that is nearest to a square."""
    rows = int(np.prod(array.shape[: _split(array.shape)], dtype=np.int64))
    return array.reshape(rows, -1) if array.size else np.zeros((0, 0))


def axes_of(shape: tuple[int, ...]) -> str:
    """Return which axes of a tensor are the rows of its picture and which the columns."""
    split, last = _split(shape), len(shape) - 1
    if last < 0:
        return "one number"
    if not split:
        return "axis 0 across"
    down, across = (
        f"axis {low}" if low == high else f"axes {low} to {high}" for low, high in ((0, split - 1), (split, last))
    )
    return f"{down} down, {across} across"


def _split(shape: tuple[int, ...]) -> int:
    """Return how many axes become the rows of a picture."""
    size = max(int(np.prod(shape, dtype=np.int64)), 1)
    splits = range(1, len(shape)) if len(shape) > 1 else (0,)
    counts = {split: max(int(np.prod(shape[:split], dtype=np.int64)), 1) for split in splits}
    return min(splits, key=lambda split: abs(np.log(counts[split] ** 2 / size)))


def shrink(first: Array, other: Array | None = None) -> Array:
    """Return the element of each block that is furthest from zero, of a matrix or of the difference of two."""
    rows, columns = _edges(first)
    cells = np.empty((len(rows) - 1, len(columns) - 1))
    for cell, (start, stop) in enumerate(itertools.pairwise(rows)):  # row by row: a tensor may be large
        block = first[start:stop].astype(np.float64)
        if other is not None:
            block = difference(block, other[start:stop].astype(np.float64))
        highest = np.maximum.reduceat(block.max(axis=0), columns[:-1])
        lowest = np.minimum.reduceat(block.min(axis=0), columns[:-1])
        cells[cell] = np.where(np.abs(lowest) > np.abs(highest), lowest, highest)
    return cells


def furthest(first: Array, other: Array) -> tuple[int, int]:
    """Return where two matrices differ most."""
    rows, columns = _edges(first)
    with np.errstate(invalid="ignore"):
        apart = np.abs(shrink(first, other))
    row, column = np.unravel_index(int(np.argmax(np.nan_to_num(apart, nan=np.inf))), apart.shape)
    block = (slice(*rows[row : row + 2]), slice(*columns[column : column + 2]))
    inside = np.abs(difference(first[block].astype(np.float64), other[block].astype(np.float64)))
    position = np.unravel_index(int(np.argmax(np.nan_to_num(inside, nan=np.inf))), inside.shape)
    return int(rows[row] + position[0]), int(columns[column] + position[1])


def _edges(grid: Array) -> list[Array]:
    return [np.linspace(0, size, min(size, CELLS) + 1).astype(int) for size in grid.shape]


def difference(first: Array, second: Array) -> Array:
    """Return ``first - second``, zero also where both are the same infinity or both NaN."""
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(same, 0.0, first - second)


def limits(*cells: Array) -> tuple[float, float]:
    """Return the smallest and the largest finite value; zeros if no value is finite."""
    finite = np.concatenate([one[np.isfinite(one)] for one in cells])
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def heat_map(cells: Array, low: float, high: float, *, diverging: bool = False) -> str:
    """Return cells as a PNG in a data URI, `low` and `high` at the ends of the scale."""
    finite = np.isfinite(cells)
    with np.errstate(over="ignore"):
        span = high / 2 - low / 2  # halves: the whole may be beyond float64
        steps = np.where(finite, cells, low) / 2 - low / 2
    entries = np.rint(steps / span * (NOT_FINITE - 1)) if span > 0 else np.full(cells.shape, NOT_FINITE // 2)
    pixels = np.where(finite, np.clip(entries, 0, NOT_FINITE - 1), NOT_FINITE).astype(np.uint8)
    for axis in (0, 1):  # a strip of a few cells is drawn thick enough to be seen
        thick = max(1, pixels.shape[1 - axis] // (12 * pixels.shape[axis]))
        pixels = pixels.repeat(thick, axis=axis)
    return _png(pixels, diverging)


def scale_bar(*, diverging: bool = False) -> str:
    """Return the colours of a scale, from low to high, as a PNG in a data URI."""
    return _png(np.arange(NOT_FINITE, dtype=np.uint8)[None], diverging)


def _png(pixels: Array, diverging: bool) -> str:
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)  # each line starts with the number of its filter: none
    lines[:, 1:] = pixels
    chunks = (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", _palette(diverging)),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"


@functools.cache
def _palette(diverging: bool) -> bytes:
    anchors = np.array([list(bytes.fromhex(one)) for one in (_BLUE_RED if diverging else _VIRIDIS).split()])
    places = np.linspace(0, len(anchors) - 1, NOT_FINITE)
    channels = [np.interp(places, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    colours: bytes = np.rint(np.stack(channels, axis=1)).astype(np.uint8).tobytes()
    return colours + bytes(_MAGENTA)


# ---- attention weights


def is_attention(array: Array) -> bool:
    """Whether an array is attention weights ``(B, H, T, S)``: nowhere negative, and each row sums to one or zero."""
    if array.ndim != 4 or not array.size or array.size > 1 << 24:
        return False
    sums = array.astype(np.float64).sum(axis=-1)
    one_or_zero = (np.abs(sums - 1) < 0.05) | (np.abs(sums) < 0.05)
    return bool((array >= 0).all() and one_or_zero.all() and sums.any())


def chosen_heads(first: Array, second: Array) -> tuple[int, list[int]]:
    """Return the sample of the batch and the heads to draw, those first where the two sides differ most."""
    apart = np.abs(difference(first.astype(np.float64), second.astype(np.float64))).max(axis=(2, 3))
    apart = np.nan_to_num(apart, nan=np.inf)
    sample = int(apart.max(axis=1).argmax())
    return sample, np.argsort(-apart[sample], kind="stable")[:HEADS].tolist()


# ---- histograms


def unit(dtype: str, oracle: Array) -> float | None:
    """Return one unit in the last place of the largest finite value of `oracle`; None if there is no such thing."""
    try:
        info: Any = ml_dtypes.finfo(dtype)
    except (TypeError, ValueError):
        return None
    largest = max((abs(limit) for limit in limits(shrink(matrix(oracle)))), default=0.0)
    return float(info.eps) * largest or None


def error_histogram(values: Array, oracle: Array, atom: float) -> tuple[Array, float, float]:
    """Count errors by their size, in octaves from ``2 ** -8`` units (smaller ones and zeros too) to ``2 ** 24``.

    Returns:
        The counts, the root mean square error and the largest one, in units of `atom`.
    """
    counts = np.zeros(_HIGHEST - _LOWEST + 1, np.int64)
    squares = largest = 0.0
    values, oracle = values.reshape(-1), oracle.reshape(-1)
    for start in range(0, values.size, 1 << 20):  # piece by piece: a tensor may be large
        piece = slice(start, start + (1 << 20))
        errors = np.abs(difference(values[piece].astype(np.float64), oracle[piece].astype(np.float64)))
        errors = np.nan_to_num(errors, nan=np.inf, posinf=np.inf) / atom
        octaves = np.clip(np.frexp(np.minimum(errors, 2.0**_HIGHEST))[1] - 1, _LOWEST, _HIGHEST)
        counts += np.bincount(np.where(errors > 0, octaves, _LOWEST) - _LOWEST, minlength=len(counts))
        largest = max(largest, float(errors.max()))
        with np.errstate(over="ignore"):
            squares += float((errors * errors).sum())
    return counts, float(np.sqrt(squares / max(values.size, 1))), largest


def octave(position: int) -> int:
    """Return the exponent of two at which a bin of `error_histogram` starts."""
    return _LOWEST + position
