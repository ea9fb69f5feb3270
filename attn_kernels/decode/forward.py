"""Attention forward of few queries: each part of the keys separately, then the combination of the parts.

A task processes a part of the keys of one head or, if the heads of a position are neighbours in memory, of all heads.
All queries that share a key head process its keys together. A part stores, for each query, the context relative to the
largest score it saw, that score, and the sum of its weights (Flash-Decoding).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from .. import words
from ..compiler.language import WORD, Array, Code, Value
from ..compiler.processor import LANES
from ..flash.blocks import Sizes, numbers_of, partition, room_for, seen_by_block, sizes_of
from ..vectors.exponentials import exp
from ..vectors.memory import add_row, copy, fill, read_rows, write_row
from .products import BLOCK, add, for_kinds, multiply
from .weights import complete, may_see, weigh

NAME = "flash_decode"

UNROLLS = PAIRS = False

ARRAYS = (words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL)
"""Words for the arguments and then the results of a call."""

LEAST_KEYS = 128
"""Keys of a part at least, but for the last: else putting parts together would take long."""

TASKS = 128
"""Tasks that keys are cut into parts for: enough for many threads, and the same for any number of them."""

NEAR = 64 * 2**10
"""Bytes of a block of all heads at most: two of them lie in the second cache."""

LEAST_BLOCK = 16
"""Keys of a block at least, of which it is a whole number of times: they fill registers."""

_NONE = float("-inf")

_RECORD = 16
"""Numbers that a part stores besides the context: two, padded so that the next part begins at a cache line."""


def cut(job: Array, sequences: Value, threads: Value) -> Value:
    """Fill in the division of a call on `sequences` sequences into tasks; return the number of tasks."""
    code = job.code
    key_heads = job[words.KEY_HEADS]
    # In a cache (B, S, H, D) the heads of a position are neighbours: a task that takes all of them reads memory in
    # order. In (B, H, S, D) each head is a run of memory.
    together = code.choose(job[words.KEY_HEAD] < job[words.KEY_TOKEN], key_heads, 1)
    units = sequences * (key_heads // together)
    most = (job[words.KEYS] + (LEAST_KEYS - 1)) // LEAST_KEYS
    parts = code.largest(code.least((TASKS + units - 1) // units, most), 1)
    job[words.TOGETHER], job[words.PARTS] = together, parts
    return units * parts


def shared(job: Array, sequences: Value) -> Value:
    """Return the bytes of the parts' records."""
    rows = sequences * job[words.HEADS] * job[words.QUERIES]
    return 4 * rows * job[words.PARTS] * _record(sizes_of(job)) + 64


def _record(sizes: Sizes) -> Value:
    """Return the length of a part's record of a query, in numbers of float32."""
    return (sizes.value_width + (2 * _RECORD - 1)) // _RECORD * _RECORD


class _Group(NamedTuple):
    """Queries that share a key head."""

    heads: Value
    rows: Value


def _group(job: Array, sizes: Sizes) -> _Group:
    heads = sizes.heads // sizes.key_heads
    return _Group(heads, heads * sizes.queries)


def _counts(job: Array) -> list[object]:
    sizes = sizes_of(job)
    rows = _group(job, sizes).rows
    return [
        rows * job[words.TOGETHER] * sizes.width,
        rows * BLOCK,
        rows,
        BLOCK * sizes.width,
        BLOCK * sizes.value_width,
    ]


def room(job: Array) -> Value:
    """Return the bytes of a thread's workspace."""
    return room_for(job.code, _counts(job))


def _records(job: Array, row: Value, part: Value) -> Array:
    """Return a part's record of a row of all sequences and heads."""
    # From a cache line on, for which `shared` has 64 bytes to spare.
    start = (job[words.SHARED] + 63) // 64 * 64
    return Array(job.code, start + 4 * _record(sizes_of(job)) * (row * job[words.PARTS] + part))


def run(code: Code, job: Array, task: Value, memory: Value) -> None:
    """Do one of the tasks: `PARTS` for each sequence and `TOGETHER` key heads."""
    sizes, parts, together = sizes_of(job), job[words.PARTS], job[words.TOGETHER]
    unit, part = task // parts, task % parts
    units = sizes.key_heads // together
    batch, first_head = unit // units, unit % units * together
    group = _group(job, sizes)
    queries, scores, factors, keys, values = partition(code, memory, _counts(job))
    # The records of a row, one per part, are neighbours: so far is a part's record of the next row.
    line = parts * _record(sizes)

    length = (sizes.keys + parts - 1) // parts
    length = (length + (BLOCK - 1)) // BLOCK * BLOCK
    low, high = seen_by_block(job, code.value(0), sizes.queries)
    begin = code.largest(part * length, low)
    end = code.least((part + 1) * length, high)

    with code.loop(0, together) as k:
        head = (first_head + k) * group.heads
        _read_queries(code, job, batch, head, group, queries.at(k * group.rows * sizes.width))
        row = (batch * sizes.heads + head) * sizes.queries
        with code.loop(row, row + group.rows) as r:
            record = _records(job, r, part)
            fill(code, record, sizes.value_width, 0.0)
            record[sizes.value_width] = _NONE
            record[sizes.value_width + 1] = 0.0

    block = _block(job, together)
    with code.loop(begin, end, block) as start, code.loop(0, together) as k:
        n_keys = code.least(end - start, block)
        head = batch * sizes.heads + (first_head + k) * group.heads
        with code.when(may_see(job, head, group.heads, start, n_keys)):
            of_key, of_value = (_place(job, word, batch, first_head + k, start) for word in (words.KEY, words.VALUE))
            next_key, next_value = _following(job, batch, first_head, k, start, block)
            query, record = queries.at(k * group.rows * sizes.width), _records(job, head * sizes.queries, part)
            tops = record.at(sizes.value_width)
            source, stride = _in_registers(job, of_key, n_keys, keys, sizes.width)
            whole = (n_keys + (LANES - 1)) // LANES * LANES
            for_kinds(job, functools.partial(
                multiply, code, query, sizes.width, source, stride, scores, group.rows, whole, sizes.registers,
                next_value,
            ))  # fmt: skip
            complete(code, job, head, scores, group.rows, start, n_keys)
            weigh(code, scores, group.rows, n_keys, tops, line, factors)
            source, stride = _in_registers(job, of_value, n_keys, values, sizes.value_width)
            for_kinds(job, functools.partial(
                add, code, scores, factors, source, stride, record, line, group.rows, n_keys, sizes.value_registers,
                next_key,
            ))  # fmt: skip


def _block(job: Array, together: Value) -> Value:
    """Return the number of keys of a block; where a task takes all heads, two blocks fit in the second-level cache."""
    code, size = job.code, numbers_of(job).bytes
    n_keys = (
        code.value(NEAR) // (together * size * (job[words.DEPTH] + job[words.VALUE_DEPTH])) // LEAST_BLOCK * LEAST_BLOCK
    )
    return code.choose(together == 1, BLOCK, code.largest(code.least(n_keys, BLOCK), LEAST_BLOCK))


def _following(
    job: Array, batch: Value, first_head: Value, k: Value, start: Value, block: Value
) -> tuple[Value, Value]:
    """Return the addresses of keys and values to prefetch while the block of a head is computed.

    These are the next block or, if the heads of a position are neighbours, a share of the next block of all heads, in
    memory order.
    """
    code, alone = job.code, job[words.TOGETHER] == 1
    key, value, next_value = (
        _place(job, word, batch, first_head, at)
        for word, at in ((words.KEY, start + block), (words.VALUE, start), (words.VALUE, start + block))
    )
    of_keys = key.address + code.choose(alone, 0, k * block * key.bytes)
    of_values = code.choose(alone, value.address, next_value.address + k * block * value.bytes)
    return of_keys, of_values


class _Rows(NamedTuple):
    """Where rows of an array begin, how many bytes they are apart, and how many they have."""

    address: Value
    stride: Value
    bytes: Value


def _place(job: Array, word: int, batch: Value, head: Value, token: Value) -> _Rows:
    """Return the rows of keys or values of a head from a token on."""
    size, first = numbers_of(job).bytes, words.KEY_SEQUENCE if word == words.KEY else words.VALUE_SEQUENCE
    depth = job[words.DEPTH if word == words.KEY else words.VALUE_DEPTH]
    offset = batch * job[first] + token * job[first + 1] + head * job[first + 2]
    return _Rows(job[word] + size * offset, size * job[first + 1], size * depth)


def _in_registers(job: Array, rows: _Rows, n_keys: Value, memory: Array, width: Value) -> tuple[Value, Value]:
    """Return where rows lie and how far they are apart: a copy where they or their numbers don't fill registers."""
    code, size = job.code, numbers_of(job).bytes
    address, stride = code.variable(rows.address), code.variable(rows.stride)
    with code.when((rows.bytes != size * width) | (n_keys % LANES != 0)):
        with code.loop(0, n_keys) as r:
            target = memory.address + size * width * r
            code.call("memcpy", target, rows.address + rows.stride * r, rows.bytes, returns=WORD)
            code.call("memset", target + rows.bytes, 0, size * width - rows.bytes, returns=WORD)
        rest = (LANES - n_keys % LANES) % LANES
        code.call("memset", memory.address + size * width * n_keys, 0, size * width * rest, returns=WORD)
        address.set(memory.address)
        stride.set(size * width)
    return address.get(), stride.get()


def _read_queries(code: Code, job: Array, batch: Value, head: Value, group: _Group, target: Value) -> None:
    """Fill in the queries of some heads times the scale, those of a head side by side."""
    sizes, numbers = sizes_of(job), numbers_of(job)
    apart = sizes.heads * sizes.depth
    with code.loop(0, group.heads) as h:
        source = job[words.QUERY] + numbers.bytes * ((batch * sizes.queries * sizes.heads + head + h) * sizes.depth)
        size = sizes.queries * sizes.width
        read_rows(code, source, apart, sizes.queries, sizes.depth, numbers.kind, numbers.scale,
                  target + 4 * h * size, sizes.width, size)  # fmt: skip


def finish(code: Code, job: Array, sequences: Value) -> None:
    """Combine the parts' records, when all are done."""
    sizes, numbers, parts = sizes_of(job), numbers_of(job), job[words.PARTS]
    width = sizes.value_width
    with code.loop(0, sequences * sizes.heads) as head, code.loop(0, sizes.queries) as query:
        row = head * sizes.queries + query
        # Parts p with largest score m_p, sum l_p and context c_p make sum(exp(m_p - m) c_p) / sum(exp(m_p - m) l_p), m
        # the largest m_p; a sink adds exp(sink - m) to the divisor.
        top, total, seen = code.variable(_NONE), code.variable(0.0), code.variable(0)
        with code.loop(0, parts) as part:
            record = _records(job, row, part)
            top.set(code.largest(record[width], top.get()))
            seen.set(seen.get() | code.choose(record[width + 1] != 0.0, 1, 0))
        with code.when((seen.get() != 0) & (job[words.SINKS] != 0)):
            sink = Array(code, job[words.SINK])[head]
            top.set(code.largest(sink, top.get()))
            total.set(exp(sink - code.choose(top.get() > _NONE, top.get(), 0.0)))
        safe = code.choose(top.get() > _NONE, top.get(), 0.0)
        context = _records(job, row, code.value(0))
        with code.loop(0, parts) as part:
            record = _records(job, row, part)
            # The sum of a part that saw no key is 0; one that saw NaN alone has no largest score, and a sum of NaN.
            factor = code.choose(
                record[width + 1] != 0.0, exp(code.choose(record[width] > _NONE, record[width], safe) - safe), 0.0
            )
            total.set(code.times_plus(record[width + 1], factor, total.get()))
            with code.either(part == 0) as (first, others):
                with first:
                    copy(code, record, width, factor, context, to="float32")
                with others:
                    add_row(code, record, width, factor, context)
        share = code.choose(total.get() != 0.0, 1.0 / total.get(), 0.0)
        index = (head // sizes.heads * sizes.queries + query) * sizes.heads + head % sizes.heads
        write_row(
            code,
            context.address,
            sizes.value_depth,
            share,
            job[words.CONTEXT] + numbers.bytes * sizes.value_depth * index,
            numbers.kind,
        )
        is_seen = seen.get() != 0
        Array(code, job[words.TOP])[row] = code.choose(is_seen, top.get(), 0.0)
        Array(code, job[words.TOTAL])[row] = code.choose(is_seen, total.get(), 0.0)
