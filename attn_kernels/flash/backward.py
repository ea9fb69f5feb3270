"""The gradients of attention, a block of queries at a time (FlashAttention-2, arXiv 2307.08691), but for one thing.

All weights of a block of queries are held, with what comes back to them, so that the slope of a row of softmax is the
sum of the very products it is subtracted from: their rounding cancels then, where that of the context would stay, times
all that the keys have in common.
"""

from __future__ import annotations

from typing import Any

from .. import words
from ..compiler.language import Array, Code, Value
from ..compiler.processor import ROWS
from ..vectors.memory import copy, fill, read_rows, write_row
from .blocks import KEYS, numbers_of, partition, room_for, seen_by_block, sizes_of
from .dropout import draw
from .scores import add_to_gradient_of_bias, complete, gradient_of_bias, may_see
from .sharing import cut_key_heads, finish_nothing, share_nothing
from .softmax import QUERIES, differentiate, multiply, weigh_again
from .tiles import transpose
from .visible import add_over_keys, add_over_queries, products

NAME = "flash_backward"

UNROLLS = True

ARRAYS = (
    *(words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL, words.D_CONTEXT, words.D_TOTAL),
    *(words.D_QUERY, words.D_KEY, words.D_VALUE, words.SLOPE),
)
"""Words for the arguments and then the results of a call."""

cut, shared, finish = cut_key_heads, share_nothing, finish_nothing


def _counts(job: Array) -> list[Any]:
    sizes = sizes_of(job)
    keys, width, value_width = sizes.keys + ROWS, sizes.width, sizes.value_width
    return [
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
        job[words.CAPPED] * keys * QUERIES,
        job[words.DROPPED] * keys * QUERIES,
        QUERIES,
        QUERIES,
        QUERIES,
        2 * QUERIES,
    ]


def room(job: Array) -> Value:
    """Return the bytes that a thread works in."""
    return room_for(job.code, _counts(job))


def run(code: Code, job: Array, task: Value, memory: Value) -> None:
    """Do one of the tasks: a key head of `SPAN` sequences, and all queries that read it."""
    sizes, span = sizes_of(job), job[words.SPAN]
    first, key_head = task // sizes.key_heads * span, task % sizes.key_heads
    group = sizes.heads // sizes.key_heads
    with code.when(job[words.D_BIASED] != 0), code.loop(0, group) as head:
        start, of_query = gradient_of_bias(job, first * sizes.heads + key_head * group + head)
        fill(code, start, code.choose(of_query != 0, sizes.queries, 1) * sizes.keys, 0.0)
    with code.loop(first, first + span) as sequence:
        _differentiate_key_head(code, job, sequence, key_head, memory)


def _differentiate_key_head(code: Code, job: Array, batch: Value, key_head: Value, memory: Value) -> None:
    """Compute the gradients of a key head of a sequence, and of all queries that read it."""
    sizes, (kind, size, scale) = sizes_of(job), numbers_of(job)
    heads, key_heads, n_queries, n_keys = sizes.heads, sizes.key_heads, sizes.queries, sizes.keys
    depth, width, registers = sizes.depth, sizes.width, sizes.registers
    value_depth, value_width, value_registers = sizes.value_depth, sizes.value_width, sizes.value_registers
    group = heads // key_heads
    keys, d_keys, values, d_values, rows, queries, *others = partition(code, memory, _counts(job))
    d_rows, d_contexts, d_queries, weights, d_weights, caps, factors, tops, slopes, shares, bounds = others

    key_place = batch * n_keys * key_heads + key_head
    for word, channels, target, line in (
        (words.KEY, depth, keys, width),
        (words.VALUE, value_depth, values, value_width),
    ):
        source, stride = job[word] + size * channels * key_place, channels * key_heads
        read_rows(code, source, stride, n_keys, channels, kind, 1.0, target, line, target.count)
    fill(code, d_keys, d_keys.count, 0.0)
    fill(code, d_values, d_values.count, 0.0)

    with code.loop(0, group * ((n_queries + (QUERIES - 1)) // QUERIES)) as block:
        head, first = key_head * group + block % group, block // group * QUERIES
        of_head = batch * heads + head
        count = code.least(n_queries - first, QUERIES)
        place = (batch * n_queries + first) * heads + head
        of_row = of_head * n_queries + first
        fill(code, tops, QUERIES, float("inf"))  # queries that only fill the block up have no weights
        fill(code, slopes, QUERIES, 0.0)
        fill(code, shares, QUERIES, 0.0)
        with code.loop(0, count) as i:
            total = Array(code, job[words.TOTAL])[of_row + i]
            tops[i] = Array(code, job[words.TOP])[of_row + i]
            shares[i] = code.choose(total != 0.0, 1.0 / total, 0.0)
        source, stride = job[words.QUERY] + size * depth * place, depth * heads
        read_rows(code, source, stride, count, depth, kind, scale, rows, width, rows.count)
        transpose(code, rows, depth, width, queries)
        source, stride = job[words.D_CONTEXT] + size * value_depth * place, value_depth * heads
        read_rows(code, source, stride, count, value_depth, kind, 1.0, d_rows, value_width, d_rows.count)
        with code.loop(0, count) as i:
            row = d_rows.at(i * value_width)
            copy(code, row, value_width, shares[i], row, to="float32")
        transpose(code, d_rows, value_depth, value_width, d_contexts)

        low, high = seen_by_block(job, first, count)
        with code.loop(low, high, KEYS) as start:
            held = code.least(high - start, KEYS)
            with code.when(may_see(job, batch, first, count, start, held)):
                at, where = QUERIES * (start - low), (first, count, start, held)
                left, right, scores = keys.at(start * width), queries, weights.at(at)
                products(code, job, left, width, right, scores, *where, depth)
                complete(job, of_head, scores, first, count, start, held, bounds, caps.at(at))
                left, right, d_out = values.at(start * value_width), d_contexts, d_weights.at(at)
                products(code, job, left, value_width, right, d_out, *where, value_depth)
                with code.when(job[words.DROPPED] != 0):
                    draw(code, job, of_head, factors.at(at), first, count, start, held)
                    multiply(code, factors.at(at), d_out, held, count)
                weigh_again(code, scores, d_out, tops, slopes, held, count)
        # Keys that only fill the last tile up have no weights.
        fill(code, weights.at(QUERIES * (high - low)), QUERIES * ROWS, 0.0)
        fill(code, d_weights.at(QUERIES * (high - low)), QUERIES * ROWS, 0.0)
        with code.loop(0, count) as i:
            share = shares[i]
            d_total = code.choose(share != 0.0, Array(code, job[words.D_TOTAL])[of_row + i], 0.0)
            slopes[i] = slopes[i] * share - d_total
            Array(code, job[words.SLOPE])[of_row + i] = slopes[i]

        fill(code, d_queries, d_queries.count, 0.0)
        with code.loop(low, high, KEYS) as start:
            held = code.least(high - start, KEYS)
            with code.when(may_see(job, batch, first, count, start, held)):
                at = QUERIES * (start - low)
                of_weights, of_scores = weights.at(at), d_weights.at(at)
                differentiate(code, of_weights, of_scores, slopes, held, count)
                with code.when(job[words.D_BIASED] != 0):
                    add_to_gradient_of_bias(code, job, of_head, of_scores, first, count, start, held)
                with code.when(job[words.CAPPED] != 0):
                    multiply(code, caps.at(at), of_scores, held, count)
                with code.when(job[words.DROPPED] != 0):
                    multiply(code, factors.at(at), of_weights, held, count)
                where = first, count, start, held
                row, out = keys.at(start * width), d_queries
                add_over_keys(code, job, of_scores, row, width, out, *where, registers)
                right, row = rows, d_keys.at(start * width)
                add_over_queries(code, job, of_scores, right, width, row, *where, registers)
                right, row, line = d_rows, d_values.at(start * value_width), value_width
                add_over_queries(code, job, of_weights, right, line, row, *where, value_registers)
        with code.loop(0, count) as i:
            to = job[words.D_QUERY] + size * depth * (place + i * heads)
            write_row(code, d_queries.at(i * width), depth, scale, to, kind)

    with code.loop(0, n_keys) as j:
        for word, channels, sums, line in (
            (words.D_KEY, depth, d_keys, width),
            (words.D_VALUE, value_depth, d_values, value_width),
        ):
            to = job[word] + size * channels * (key_place + j * key_heads)
            write_row(code, sums.at(j * line), channels, 1.0, to, kind)
