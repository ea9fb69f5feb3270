"""Attention forward, a block of queries at a time (FlashAttention-2, arXiv 2307.08691).

Scores lie with the keys in rows and the queries side by side, so that what happens to a query, from its largest score
to the sum of its weights, happens in its own lane of a register.
"""

from __future__ import annotations

from typing import Any

from .. import words
from ..compiler.language import Array, Code, Value
from ..compiler.processor import ROWS
from ..vectors.exponentials import exp
from ..vectors.memory import copy, fill, read_rows, write_row
from .blocks import KEYS, numbers_of, partition, room_for, seen_by_block, sizes_of
from .dropout import draw
from .scores import complete, may_see
from .sharing import cut_query_heads, finish_nothing, share_nothing
from .softmax import QUERIES, multiply, weigh
from .tiles import transpose
from .visible import add_over_keys, products

NAME = "flash_forward"

UNROLLS = True

ARRAYS = (words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL)
"""Words for the arguments and then the results of a call."""

cut, shared, finish = cut_query_heads, share_nothing, finish_nothing

_NONE = float("-inf")


def _counts(job: Array) -> list[Any]:
    sizes = sizes_of(job)
    return [
        (sizes.keys + ROWS) * sizes.depth,
        sizes.keys * sizes.value_width,
        QUERIES * sizes.depth,
        QUERIES * sizes.depth,
        (KEYS + 2 * ROWS) * QUERIES,
        KEYS * QUERIES,
        (QUERIES + ROWS) * sizes.value_width,
        QUERIES,
        QUERIES,
        QUERIES,
        2 * QUERIES,
    ]


def room(job: Array) -> Value:
    """Return the bytes that a thread works in."""
    return room_for(job.code, _counts(job))


def run(code: Code, job: Array, task: Value, memory: Value) -> None:
    """Do one of the tasks, `PARTS` for each head of each sequence: every so many blocks of queries."""
    sizes, numbers, parts = sizes_of(job), numbers_of(job), job[words.PARTS]
    of_head, part = task // parts, task % parts
    batch, head = of_head // sizes.heads, of_head % sizes.heads
    depth, width, size = sizes.depth, sizes.value_width, numbers.bytes
    keys, values, rows, queries, scores, factors, context, *of_queries = partition(code, memory, _counts(job))
    tops, sums, shrink, bounds = of_queries

    place = batch * sizes.keys * sizes.key_heads + head // (sizes.heads // sizes.key_heads)
    for word, channels, target, line in (
        (words.KEY, depth, keys, depth),
        (words.VALUE, sizes.value_depth, values, width),
    ):
        source, stride = job[word] + size * channels * place, channels * sizes.key_heads
        read_rows(code, source, stride, sizes.keys, channels, numbers.kind, 1.0, target, line, target.count)

    with code.loop(part * QUERIES, sizes.queries, parts * QUERIES) as first:
        count = code.least(sizes.queries - first, QUERIES)
        place = (batch * sizes.queries + first) * sizes.heads + head
        source, stride = job[words.QUERY] + size * depth * place, depth * sizes.heads
        read_rows(code, source, stride, count, depth, numbers.kind, numbers.scale, rows, depth, rows.count)
        transpose(code, rows, depth, depth, queries)
        fill(code, tops, QUERIES, _NONE)
        fill(code, sums, QUERIES, 0.0)
        fill(code, context, context.count, 0.0)
        low, high = seen_by_block(job, first, count)
        with code.loop(low, high, KEYS) as start:
            held = code.least(high - start, KEYS)
            with code.when(may_see(job, batch, first, count, start, held)):
                at, out = scores, context
                of_keys, of_values = keys.at(start * depth), values.at(start * width)
                products(code, job, of_keys, depth, queries, at, first, count, start, held, depth)
                complete(job, of_head, at, first, count, start, held, bounds)
                weigh(code, at, tops, sums, shrink, held, count)
                with code.when(job[words.DROPPED] != 0):
                    draw(code, job, of_head, factors, first, count, start, held)
                    multiply(code, factors, at, held, count)
                with code.loop(0, count) as i:
                    factor, row = shrink[i], context.at(i * width)
                    with code.when(factor != 1.0):
                        copy(code, row, width, factor, row, to="float32")
                add_over_keys(code, job, at, of_values, width, out, first, count, start, held, sizes.value_registers)

        with code.loop(0, count) as i:
            top, total, shrunk = (code.variable(one) for one in (tops[i], sums[i], 1.0))
            is_hidden = (top.get() == _NONE) & (total.get() == total.get())
            with code.either(is_hidden) as (hidden, seen):
                with hidden:
                    top.set(code.value(0.0))
                    total.set(code.value(0.0))
                with seen, code.when(job[words.SINKS] != 0):
                    sink = Array(code, job[words.SINK])[of_head]
                    largest = code.largest(sink, top.get())
                    shrunk.set(exp(top.get() - largest))
                    total.set(total.get() * shrunk.get() + exp(sink - largest))
                    top.set(largest)
            share = code.choose(total.get() != 0.0, shrunk.get() / total.get(), 0.0)
            to = job[words.CONTEXT] + size * sizes.value_depth * (place + i * sizes.heads)
            write_row(code, context.at(i * width), sizes.value_depth, share, to, numbers.kind)
            of_row = of_head * sizes.queries + first + i
            Array(code, job[words.TOP])[of_row] = top.get()
            Array(code, job[words.TOTAL])[of_row] = total.get()
