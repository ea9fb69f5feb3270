"""Parts of arrays that the kernels work on: where they lie, and which keys the queries of a block see."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from .. import words
from ..compiler.language import FLOAT, WORD, Array, Code, Value
from ..compiler.processor import LANES

# With `QUERIES` 24 KiB of float32. A multiple of `softmax.PART` (12), `ROWS` (6) and `pairs.EDGE` (32), so that only
# the last block of a sequence has remainders.
KEYS = 96
"""Keys whose scores are computed at once: with queries and values, they fit in the first-level cache."""

# Bytes of a cache line, at which arrays begin: an aligned vector of 64 bytes or less is never in two lines.
_LINE = 64


class BlockJob(Array):
    """The words of a job; compile-time constants among them remove the code that they rule out."""

    def __getitem__(self, index: object) -> Value:
        constants = self.code.module.known
        return (
            self.code.value(constants[index])
            if type(index) is int and index in constants
            else super().__getitem__(index)
        )


def job_at(code: Code, address: Value) -> Array:
    """Return the words of a job."""
    return BlockJob(code, address, WORD)


class Sizes(NamedTuple):
    """The sizes of a call."""

    heads: Value
    key_heads: Value
    queries: Value
    keys: Value
    depth: Value
    value_depth: Value
    registers: Value
    """Registers for the channels of a query or key; ``width`` is their number of lanes in all."""
    value_registers: Value
    width: Value
    value_width: Value


def sizes_of(job: Array) -> Sizes:
    """Return the sizes of a call."""
    names = (words.HEADS, words.KEY_HEADS, words.QUERIES, words.KEYS, words.DEPTH, words.VALUE_DEPTH)
    heads, key_heads, queries, keys, depth, value_depth = (job[name] for name in names)
    registers, value_registers = ((channels + (LANES - 1)) // LANES for channels in (depth, value_depth))
    widths = registers * LANES, value_registers * LANES
    return Sizes(heads, key_heads, queries, keys, depth, value_depth, registers, value_registers, *widths)


class ScoreNumbers(NamedTuple):
    """The arrays' number format and the scale of the scores."""

    kind: Value
    bytes: Value
    scale: Value


def numbers_of(job: Array) -> ScoreNumbers:
    """Return the kind of the arrays' numbers, the bytes of one, and the scale of the scores."""
    size = job.code.choose(job[words.KIND] == words.KINDS["float32"], 4, 2)
    return ScoreNumbers(job[words.KIND], size, float_in(job, words.SCALE))


def float_in(job: Array, word: int) -> Value:
    """Return as float32 the number whose bits as float64 are a word."""
    return Value(job.code, job.code.builder.fptrunc(job[word].bits_as(ir.DoubleType()).ir, FLOAT))


def partition(code: Code, memory: object, counts: list[object]) -> list[Array]:
    """Return arrays of `counts` numbers in a block of memory, each aligned to a cache line."""
    arrays, end = [], code.value(memory)
    for count in counts:
        arrays.append(Array(code, (end + (_LINE - 1)) // _LINE * _LINE, count=code.value(count)))
        end = arrays[-1].at(count)
    return arrays


def room_for(code: Code, counts: list[object]) -> Value:
    """Return the bytes that hold arrays of `counts` numbers each, at any alignment of the block."""
    # From the address `_LINE`, not 0: the line in front is the room that aligning an arbitrary address may take.
    last = partition(code, _LINE, counts)[-1]
    return last.at(last.count)


def seen_by(job: Array, query: Value) -> tuple[Value, Value]:
    """Return the first key that a query sees, and the end (exclusive) of those it sees."""
    code, n_queries, n_keys, bounds = job.code, job[words.QUERIES], job[words.KEYS], job[words.BOUNDS]
    places = code.variable(0), code.variable(n_keys)
    with code.when(bounds != 0):
        of_queries, row = Array(code, bounds, WORD), code.least(query, n_queries - 1)
        for output, at in zip(places, (row, row + n_queries), strict=True):
            output.set(code.largest(code.least(of_queries[at], n_keys), 0))
    start, end = (place.get() for place in places)
    return start, end


def seen_by_block(job: Array, first: Value, count: Value, step: int = 1) -> tuple[Value, Value]:
    """Return the first key that any of the queries sees, and the end (exclusive) of those that any sees.

    The first is rounded down to a multiple of `step`.
    """
    start, end = seen_by(job, first)[0] // step * step, seen_by(job, first + count - 1)[1]  # neither goes back
    return start, job.code.largest(start, end)
