"""Parts of arrays that the kernels work on: where they lie, and which keys the queries of a block see."""

from __future__ import annotations

import numpy as np
from numba import carray

from . import words
from .compiling import compiled, stay_apart
from .memory import as_double, as_pointer
from .processor import LANES
from .softmax import QUERIES

KEYS = 96
"""Keys whose scores are computed at once: with queries and values, what the nearest cache holds."""

_HIDDEN = np.float32(-np.inf)
_LINE = 64


@compiled
def registers_of(channels):
    """Return how many registers hold so many channels."""
    return (channels + LANES - 1) // LANES


@compiled
def shape_of(job):
    """Return the sizes of a call: query heads, key heads, queries, keys, channels of keys, channels of values."""
    heads = job[words.HEADS], job[words.KEY_HEADS]
    return (*heads, job[words.QUERIES], job[words.KEYS], job[words.DEPTH], job[words.VALUE_DEPTH])


@compiled
def numbers_of(job):
    """Return the kind of the arrays' numbers, their bytes, and the scale of the scores."""
    kind = job[words.KIND]
    return kind, 4 if kind == 0 else 2, np.float32(as_double(job[words.SCALE]))


@compiled
def room_of(sizes):
    """Return the bytes that arrays of so many numbers take, each beginning a line of the cache."""
    total = _LINE
    for size in sizes:
        total += (4 * size + _LINE - 1) // _LINE * _LINE
    return total


@compiled
def floats(memory, size):
    """Return an array in some memory, and the memory behind it."""
    start = (memory + _LINE - 1) // _LINE * _LINE
    return carray(as_pointer(start), (size,), np.float32), start + 4 * size


@compiled
def transpose(rows, columns, width, out):
    """Fill `out` with the first `columns` columns of `QUERIES` rows, each a row of it."""
    stay_apart()
    for c in range(columns):
        for r in range(QUERIES):
            out[c * QUERIES + r] = rows[r * width + c]


@compiled
def seen_by(job, query):
    """Return the first key that a query sees, and the one after the last."""
    keys = job[words.KEYS]
    if not job[words.BANDED]:
        return 0, keys
    end = query + job[words.OFFSET] + 1
    start = end - job[words.SIZE] if job[words.SIZE] else 0
    return max(0, min(keys, start)), max(0, min(keys, end))


@compiled
def seen_by_block(job, first, count):
    """Return the first key that some of the queries see, and the one after the last that some do."""
    start, end = seen_by(job, first)[0], seen_by(job, first + count - 1)[1]
    return start, max(start, end)


@compiled
def hide(job, scores, first, count, start, held, bounds):
    """Set the scores of keys from `start` on that the queries from `first` on do not see to minus infinity.

    `bounds` is room for two numbers per query.
    """
    stay_apart()
    low, high = seen_by(job, first + count - 1)[0], seen_by(job, first)[1]
    if start >= low and start + held <= high:
        return
    for i in range(QUERIES):
        low, high = seen_by(job, first + i)
        # In float32 only small numbers are exact.
        bounds[i], bounds[QUERIES + i] = max(0, min(held, low - start)), max(0, min(held, high - start))
    for j in range(held):
        key = np.float32(j)
        for i in range(QUERIES):
            seen = (bounds[i] <= key) & (key < bounds[QUERIES + i])
            scores[j * QUERIES + i] = scores[j * QUERIES + i] if seen else _HIDDEN
