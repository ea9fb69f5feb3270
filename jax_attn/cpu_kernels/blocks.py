"""Parts of arrays that the kernels work on: where they lie, and which keys the queries of a block see."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from . import words
from .language import FLOAT, WORD, Array, Code, Value, routine
from .memory import fill
from .processor import LANES
from .softmax import QUERIES

KEYS = 96
"""Keys whose scores are computed at once: with queries and values, what the nearest cache holds."""

_LINE = 64

_BYTE = ir.IntType(8)

_HIDDEN = float("-inf")


def job_at(code: Code, address: Value) -> Array:
    """Return the words of a job."""
    return Array(code, address, WORD)


class Sizes(NamedTuple):
    """The sizes of a call."""

    heads: Value
    key_heads: Value
    queries: Value
    keys: Value
    depth: Value
    value_depth: Value
    registers: Value
    """Those that hold the channels of a query or key; ``width`` is what they have room for."""
    value_registers: Value
    width: Value
    value_width: Value


def sizes_of(job: Array) -> Sizes:
    """Return the sizes of a call."""
    names = (words.HEADS, words.KEY_HEADS, words.QUERIES, words.KEYS, words.DEPTH, words.VALUE_DEPTH)
    *others, depth, value_depth = (job[name] for name in names)
    registers, value_registers = ((channels + (LANES - 1)) // LANES for channels in (depth, value_depth))
    return Sizes(*others, depth, value_depth, registers, value_registers, registers * LANES, value_registers * LANES)


class Numbers(NamedTuple):
    """What the arrays of a call hold."""

    kind: Value
    bytes: Value
    scale: Value


def numbers_of(job: Array) -> Numbers:
    """Return the kind of the arrays' numbers, the bytes of one, and the scale of the scores."""
    code, kind = job.code, job[words.KIND]
    scale = code.builder.fptrunc(job[words.SCALE].bits_as(ir.DoubleType()).ir, FLOAT)
    return Numbers(kind, code.choose(kind == words.KINDS["float32"], 4, 2), Value(code, scale))


def partition(code: Code, memory: Any, counts: list[Any]) -> list[Array]:
    """Return arrays of so many numbers in some memory, each at the beginning of a line of the cache."""
    arrays, end = [], code.value(memory)
    for count in counts:
        arrays.append(Array(code, (end + (_LINE - 1)) // _LINE * _LINE, count=code.value(count)))
        end = arrays[-1].at(count)
    return arrays


def room_for(code: Code, counts: list[Any]) -> Value:
    """Return the bytes of memory in which there is room for so many numbers each, wherever it begins."""
    last = partition(code, _LINE, counts)[-1]
    return last.at(last.count)


@routine
def transpose(code: Code, rows: Value, columns: Value, width: Value, out: Value) -> None:
    """Fill `out` with the first `columns` columns of `QUERIES` rows, each a row of it."""
    source, target = Array(code, rows), Array(code, out)
    with code.loop(0, columns) as c, code.loop(0, QUERIES) as r:
        target[c * QUERIES + r] = source[r * width + c]


def seen_by(job: Array, query: Value) -> tuple[Value, Value]:
    """Return the first key that a query sees, and the one after the last."""
    code, keys, size, banded = job.code, job[words.KEYS], job[words.SIZE], job[words.BANDED] != 0
    end = query + job[words.OFFSET] + 1
    start = code.choose(size != 0, end - size, 0)
    first, last = (code.largest(code.least(key, keys), 0) for key in (start, end))
    return code.choose(banded, first, 0), code.choose(banded, last, keys)


def seen_by_block(job: Array, first: Value, count: Value) -> tuple[Value, Value]:
    """Return the first key that some of the queries see, and the one after the last that some do."""
    start, end = seen_by(job, first)[0], seen_by(job, first + count - 1)[1]
    return start, job.code.largest(start, end)


@routine
def hide_outside(
    code: Code, address: Value, scores: Value, first: Value, count: Value, start: Value, held: Value, bounds: Value
) -> None:
    """Set the scores of keys from `start` on outside the bands of the queries from `first` on to minus infinity.

    `address` is that of the job, and `bounds` room for two numbers per query.
    """
    job = job_at(code, address)
    low, high = seen_by(job, first + count - 1)[0], seen_by(job, first)[1]
    vector = ir.VectorType(FLOAT, LANES)
    with code.when((start < low) | (start + held > high)):
        of_queries = Array(code, bounds)
        with code.loop(0, QUERIES) as i:
            for place, key in zip((i, i + QUERIES), seen_by(job, first + i), strict=True):
                # In float32 only small numbers are exact.
                among = code.largest(code.least(key - start, held), 0)
                of_queries[place] = among.as_float()
        with code.loop(0, held) as j, code.loop(0, QUERIES, LANES) as i:
            key, place = code.vector(j.as_float(), LANES), scores + 4 * (j * QUERIES + i)
            after, before = (code.load(of_queries.at(at), vector) for at in (i, i + QUERIES))
            seen = (after <= key) & (key < before)
            code.store(code.choose(seen, code.load(place, vector), _HIDDEN), place)


@routine
def hide_masked(
    code: Code, address: Value, head: Value, scores: Value, first: Value, count: Value, start: Value, held: Value
) -> None:
    """Set the scores of keys from `start` on that the mask hides from the queries from `first` on to minus infinity.

    `address` is that of the job, and `head` counts the query heads of all sequences.
    """
    job = job_at(code, address)
    of_query, of_key, heads = job[words.MASK_QUERY], job[words.MASK_KEY], job[words.HEADS]
    mask = job[words.MASK] + head // heads * job[words.MASK_BATCH] + head % heads * job[words.MASK_HEAD]

    def hides(i: Value, j: Value) -> Value:
        return code.load(mask + i * of_query + (start + j) * of_key, _BYTE, align=1) == 0

    with code.either(of_query == 0) as (for_all, for_each):
        with for_all, code.loop(0, held) as j, code.when(hides(first, j)):
            fill(code, scores + 4 * QUERIES * j, QUERIES, _HIDDEN)
        with for_each, code.loop(0, held) as j, code.loop(0, count) as i:
            place = scores + 4 * (j * QUERIES + i)
            code.store(code.choose(hides(first + i, j), _HIDDEN, code.load(place, FLOAT)), place)
