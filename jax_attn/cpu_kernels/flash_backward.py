"""The gradients of attention, a block of queries at a time (FlashAttention-2, arXiv 2307.08691), but for one thing.

All weights of a block of queries are held, with what comes back to them, so that the slope of a row of softmax is the
sum of the very products it is subtracted from: their rounding cancels then, where that of the context would stay, times
all that the keys have in common.
"""

from __future__ import annotations

import numpy as np

from . import words
from .blocks import KEYS, floats, hide, numbers_of, registers_of, room_of, seen_by_block, shape_of, transpose
from .compiling import compiled, inlined
from .memory import load_float, read_rows, store_float, write_row
from .processor import LANES, ROWS
from .products import add_product, product
from .softmax import QUERIES, differentiate, weigh_again

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)

PER_HEAD = False
"""Whether tasks are those of query heads, in parts, and not those of key heads."""


@compiled
def _sizes(job):
    keys = job[words.KEYS] + ROWS
    width, value_width = registers_of(job[words.DEPTH]) * LANES, registers_of(job[words.VALUE_DEPTH]) * LANES
    return (
        keys * width,
        keys * width,
        keys * value_width,
        keys * value_width,
        QUERIES * width,
        QUERIES * width,
        QUERIES * value_width,
        QUERIES * value_width,
        (QUERIES + ROWS) * width,
        (keys + ROWS) * QUERIES,
        (keys + ROWS) * QUERIES,
        QUERIES,
        QUERIES,
        QUERIES,
        2 * QUERIES,
    )


@compiled
def room(job):
    """Return the bytes that a thread works in."""
    return room_of(_sizes(job))


@inlined
def run(job, task, memory):
    """Do one of the tasks: a key head of a sequence, and all queries that read it."""
    heads, key_heads, n_queries, n_keys, depth, value_depth = shape_of(job)
    batch, key_head = task // key_heads, task % key_heads
    kind, size, scale = numbers_of(job)
    registers, value_registers = registers_of(depth), registers_of(value_depth)
    width, value_width = registers * LANES, value_registers * LANES

    sizes = _sizes(job)
    keys, memory = floats(memory, sizes[0])
    d_keys, memory = floats(memory, sizes[1])
    values, memory = floats(memory, sizes[2])
    d_values, memory = floats(memory, sizes[3])
    rows, memory = floats(memory, sizes[4])
    queries, memory = floats(memory, sizes[5])
    d_rows, memory = floats(memory, sizes[6])
    d_contexts, memory = floats(memory, sizes[7])
    d_queries, memory = floats(memory, sizes[8])
    weights, memory = floats(memory, sizes[9])
    d_weights, memory = floats(memory, sizes[10])
    tops, memory = floats(memory, sizes[11])
    slopes, memory = floats(memory, sizes[12])
    shares, memory = floats(memory, sizes[13])
    bounds, memory = floats(memory, sizes[14])

    key_place = batch * n_keys * key_heads + key_head
    source = job[words.KEY] + size * depth * key_place
    read_rows(source, depth * key_heads, n_keys, depth, kind, _ONE, keys, width)
    source = job[words.VALUE] + size * value_depth * key_place
    read_rows(source, value_depth * key_heads, n_keys, value_depth, kind, _ONE, values, value_width)
    d_keys[:] = _ZERO
    d_values[:] = _ZERO
    for block in range(heads // key_heads * ((n_queries + QUERIES - 1) // QUERIES)):
        head = key_head * (heads // key_heads) + block % (heads // key_heads)
        first = block // (heads // key_heads) * QUERIES
        count = min(QUERIES, n_queries - first)
        place = (batch * n_queries + first) * heads + head
        of_rows = 4 * ((batch * heads + head) * n_queries + first)
        tops[:] = np.float32(np.inf)  # queries that only fill the block up have no weights
        slopes[:] = _ZERO
        shares[:] = _ZERO
        for i in range(count):
            total = load_float(job[words.TOTAL] + of_rows + 4 * i)
            tops[i] = load_float(job[words.TOP] + of_rows + 4 * i)
            shares[i] = _ONE / total if total != _ZERO else _ZERO
        read_rows(job[words.QUERY] + size * depth * place, depth * heads, count, depth, kind, scale, rows, width)
        transpose(rows, depth, width, queries)
        source = job[words.D_CONTEXT] + size * value_depth * place
        read_rows(source, value_depth * heads, count, value_depth, kind, _ONE, d_rows, value_width)
        for i in range(count):
            write_row(d_rows, i * value_width, value_width, 0, shares[i], d_rows.ctypes.data + 4 * i * value_width)
        transpose(d_rows, value_depth, value_width, d_contexts)

        low, high = seen_by_block(job, first, count)
        for start in range(low, high, KEYS):
            held, at = min(KEYS, high - start), 4 * QUERIES * (start - low)
            out = weights.ctypes.data + at
            of_keys = keys.ctypes.data + 4 * start * width
            product(of_keys, width, 1, queries.ctypes.data, QUERIES, out, QUERIES, held, QUERIES // LANES, depth)
            hide(job, weights[QUERIES * (start - low) :], first, count, start, held, bounds)
            out = d_weights.ctypes.data + at
            of_values, right = values.ctypes.data + 4 * start * value_width, d_contexts.ctypes.data
            product(of_values, value_width, 1, right, QUERIES, out, QUERIES, held, QUERIES // LANES, value_depth)
            weigh_again(weights.ctypes.data + at, out, tops.ctypes.data, slopes.ctypes.data, held)
        # Keys that only fill the last tile up have no weights.
        weights[QUERIES * (high - low) : QUERIES * (high - low + ROWS)] = _ZERO
        d_weights[QUERIES * (high - low) : QUERIES * (high - low + ROWS)] = _ZERO
        for i in range(count):
            slopes[i] *= shares[i]
            if shares[i] != _ZERO:
                slopes[i] -= load_float(job[words.D_TOTAL] + of_rows + 4 * i)
            store_float(job[words.SLOPE] + of_rows + 4 * i, slopes[i])

        d_queries[:] = _ZERO
        for start in range(low, high, KEYS):
            held, at = min(KEYS, high - start), 4 * QUERIES * (start - low)
            of_weights, of_scores = weights.ctypes.data + at, d_weights.ctypes.data + at
            differentiate(of_weights, of_scores, slopes.ctypes.data, held)
            right, out = keys.ctypes.data + 4 * start * width, d_queries.ctypes.data
            add_product(of_scores, 1, QUERIES, right, width, out, width, QUERIES, registers, held)
            right, out = rows.ctypes.data, d_keys.ctypes.data + 4 * start * width
            add_product(of_scores, QUERIES, 1, right, width, out, width, held, registers, count)
            right, out = d_rows.ctypes.data, d_values.ctypes.data + 4 * start * value_width
            add_product(of_weights, QUERIES, 1, right, value_width, out, value_width, held, value_registers, count)
        for i in range(count):
            at = job[words.D_QUERY] + size * depth * (place + i * heads)
            write_row(d_queries, i * width, depth, kind, scale, at)
    for j in range(n_keys):
        at = key_place + j * key_heads
        write_row(d_keys, j * width, depth, kind, _ONE, job[words.D_KEY] + size * depth * at)
        write_row(d_values, j * value_width, value_depth, kind, _ONE, job[words.D_VALUE] + size * value_depth * at)
