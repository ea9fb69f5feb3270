"""Attention forward, a block of queries at a time (FlashAttention-2, arXiv 2307.08691).

Scores lie with the keys in rows and the queries side by side, so that what happens to a query, from its largest score
to the sum of its weights, happens in its own lane of a register.
"""

from __future__ import annotations

import numpy as np

from . import words
from .blocks import KEYS, floats, hide, numbers_of, registers_of, room_of, seen_by_block, shape_of, transpose
from .compiling import compiled, inlined
from .memory import load_float, read_rows, store_float, write_row
from .processor import LANES, ROWS
from .products import add_product, product
from .softmax import QUERIES, weigh

_HIDDEN, _ONE, _ZERO = np.float32(-np.inf), np.float32(1.0), np.float32(0.0)

PER_HEAD = True
"""Whether tasks are those of query heads, in parts, and not those of key heads."""


@compiled
def _sizes(job):
    keys, depth, width = job[words.KEYS], job[words.DEPTH], registers_of(job[words.VALUE_DEPTH]) * LANES
    return (
        (keys + ROWS) * depth,
        keys * width,
        QUERIES * depth,
        depth * QUERIES,
        (KEYS + 2 * ROWS) * QUERIES,
        (QUERIES + ROWS) * width,
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
    """Do one of the tasks, `PARTS` for each head of each sequence: every so many blocks of queries."""
    of_head, part = task // job[words.PARTS], task % job[words.PARTS]
    heads, key_heads, n_queries, n_keys, depth, value_depth = shape_of(job)
    batch, head = of_head // heads, of_head % heads
    kind, size, scale = numbers_of(job)
    registers = registers_of(value_depth)
    width = registers * LANES

    sizes = _sizes(job)
    keys, memory = floats(memory, sizes[0])
    values, memory = floats(memory, sizes[1])
    rows, memory = floats(memory, sizes[2])
    queries, memory = floats(memory, sizes[3])
    scores, memory = floats(memory, sizes[4])
    context, memory = floats(memory, sizes[5])
    tops, memory = floats(memory, sizes[6])
    sums, memory = floats(memory, sizes[7])
    shrink, memory = floats(memory, sizes[8])
    bounds, memory = floats(memory, sizes[9])

    place = batch * n_keys * key_heads + head // (heads // key_heads)
    source = job[words.KEY] + size * depth * place
    read_rows(source, depth * key_heads, n_keys, depth, kind, _ONE, keys, depth)
    source = job[words.VALUE] + size * value_depth * place
    read_rows(source, value_depth * key_heads, n_keys, value_depth, kind, _ONE, values, width)
    for first in range(part * QUERIES, n_queries, job[words.PARTS] * QUERIES):
        count = min(QUERIES, n_queries - first)
        place = (batch * n_queries + first) * heads + head
        read_rows(job[words.QUERY] + size * depth * place, depth * heads, count, depth, kind, scale, rows, depth)
        transpose(rows, depth, depth, queries)
        tops[:] = _HIDDEN
        sums[:] = _ZERO
        context[:] = _ZERO
        low, high = seen_by_block(job, first, count)
        for start in range(low, high, KEYS):
            held = min(KEYS, high - start)
            of_keys, of_values = keys.ctypes.data + 4 * start * depth, values.ctypes.data + 4 * start * width
            at = scores.ctypes.data
            product(of_keys, depth, 1, queries.ctypes.data, QUERIES, at, QUERIES, held, QUERIES // LANES, depth)
            hide(job, scores, first, count, start, held, bounds)
            weigh(at, tops.ctypes.data, sums.ctypes.data, shrink.ctypes.data, held)
            for i in range(count):
                if shrink[i] != _ONE:
                    write_row(context, i * width, width, 0, shrink[i], context.ctypes.data + 4 * i * width)
            add_product(at, 1, QUERIES, of_values, width, context.ctypes.data, width, QUERIES, registers, held)
        for i in range(count):
            top, total, shrunk = tops[i], sums[i], _ONE
            if top == _HIDDEN and total == total:
                top, total = _ZERO, _ZERO
            elif job[words.SINKS]:
                sink = load_float(job[words.SINK] + 4 * of_head)
                new = max(top, sink)
                shrunk = np.exp(top - new)
                top, total = new, total * shrunk + np.exp(sink - new)
            share = shrunk / total if total != _ZERO else _ZERO
            at = job[words.CONTEXT] + size * value_depth * (place + i * heads)
            write_row(context, i * width, value_depth, kind, share, at)
            at = 4 * (of_head * n_queries + first + i)
            store_float(job[words.TOP] + at, top)
            store_float(job[words.TOTAL] + at, total)
