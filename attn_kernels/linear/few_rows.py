"""The product of a few rows and a matrix ``(in, out)``: partial sums over ranges of its lines, then their total.

A task processes neighbouring lines of the matrix, which it reads in memory order.
"""

from __future__ import annotations

from .. import words
from ..compiler.language import Array, Code, Value
from ..compiler.processor import LANES
from ..decode.products import BLOCK, add, for_kinds
from ..flash.blocks import numbers_of, partition, room_for
from ..vectors.memory import BYTES, add_row, copy, fill, write_row

NAME = "few_rows"

UNROLLS = PAIRS = False

ARRAYS = (words.QUERY, words.VALUE, words.CONTEXT)
"""Words for the arguments and then the result of a call: `QUERIES` rows of `DEPTH` numbers, a matrix, the product."""

LINES = 16
"""Lines of the matrix that are added at once: as many streams as the processor follows."""

PARTS = 16
"""Parts that the lines are cut into at most: the same for any number of threads."""


def cut(job: Array, sequences: Value, threads: Value) -> Value:
    """Fill in the division of the lines; return the number of parts."""
    code = job.code
    parts = code.least((job[words.DEPTH] + (BLOCK - 1)) // BLOCK, PARTS)
    job[words.PARTS] = parts
    return parts


def shared(job: Array, sequences: Value) -> Value:
    """Return the bytes of the parts' sums."""
    return 4 * job[words.PARTS] * job[words.QUERIES] * job[words.VALUE_DEPTH] + 64


def _counts(job: Array) -> list[object]:
    """Return the sizes of the two arrays in the workspace: a block of numbers of every row, and a factor per row."""
    return [job[words.QUERIES] * BLOCK, job[words.QUERIES]]


def room(job: Array) -> Value:
    """Return the bytes of a thread's workspace."""
    return room_for(job.code, _counts(job))


def _sums(job: Array, part: Value) -> Array:
    """Return the array of a part's sums."""
    # From a cache line on, for which `shared` has 64 bytes to spare.
    start = (job[words.SHARED] + 63) // 64 * 64
    return Array(job.code, start + 4 * part * job[words.QUERIES] * job[words.VALUE_DEPTH])


def run(code: Code, job: Array, task: Value, memory: Value) -> None:
    """Do one of the tasks: a part of the lines."""
    rows, depth, columns, size = job[words.QUERIES], job[words.DEPTH], job[words.VALUE_DEPTH], numbers_of(job).bytes
    numbers, factors = partition(code, memory, _counts(job))
    sums, stride = _sums(job, task), size * columns
    fill(code, sums, rows * columns, 0.0)
    fill(code, factors, rows, 1.0)
    length = (depth + job[words.PARTS] - 1) // job[words.PARTS]
    with code.loop(task * length, code.least((task + 1) * length, depth), LINES) as start:
        n_lines = code.least(code.least((task + 1) * length, depth) - start, LINES)

        def some(kind: str, start: Value = start, n_lines: Value = n_lines) -> None:
            with code.loop(0, rows) as r:
                source = job[words.QUERY] + BYTES[kind] * (r * depth + start)
                copy(code, source, n_lines, 1.0, numbers.at(r * BLOCK), of=kind, to="float32")
            lines = job[words.VALUE] + stride * start
            add(code, numbers, factors, lines, stride, sums, columns, rows, n_lines, columns // LANES,
                lines + stride * LINES, kind=kind)  # fmt: skip

        for_kinds(job, some)


def finish(code: Code, job: Array, sequences: Value) -> None:
    """Add up the parts' sums, when all are done."""
    rows, columns, kind = job[words.QUERIES], job[words.VALUE_DEPTH], numbers_of(job)
    whole = _sums(job, code.value(0))
    # In the order of the parts, whichever thread made them: the bits do not depend on the number of threads.
    with code.loop(1, job[words.PARTS]) as part:
        add_row(code, _sums(job, part), rows * columns, 1.0, whole)
    write_row(code, whole.address, rows * columns, 1.0, job[words.CONTEXT], kind.kind)
