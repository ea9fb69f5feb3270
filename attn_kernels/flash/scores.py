"""Steps on a block of scores before softmax: cap, bias, intervals, masks, documents; the gradient of the bias.

Scores have the keys in rows of `QUERIES`. Routines take the address of the job; heads are counted over all sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from .. import words
from ..compiler.language import FLOAT, WORD, Array, Code, Value, like, routine
from ..compiler.processor import LANES
from ..vectors.memory import fill
from .blocks import float_in, job_at, seen_by
from .softmax import QUERIES, cap
from .tiles import over_tiles, transpose_registers

_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_VECTOR = ir.VectorType(FLOAT, LANES)

_HIDDEN = float("-inf")


class _Place(NamedTuple):
    """Address of a head's numbers in an array broadcast to the scores, and their strides."""

    first: Value
    of_query: Value
    of_key: Value


def place_in(job: Array, head: Value, array: int, span: int) -> _Place:
    """Return the place of a head; `array` is the word of the address, `span` the first of five of the shape."""
    sequence, of_sequence = head // job[words.HEADS], head % job[words.HEADS]
    start = sequence // job[span] * job[span + 1] + of_sequence * job[span + 2]
    size = 1 if array == words.MASK else 4
    return _Place(job[array] + size * start, job[span + 3], job[span + 4])


def complete(
    job: Array,
    head: Value,
    scores: Array | Value,
    first: Value,
    count: Value,
    start: Value,
    n_keys: Value,
    bounds: Array,
    slopes: Value | None = None,
) -> None:
    """Cap the products of queries and keys, add the bias, and set hidden scores to minus infinity.

    If given, `slopes` receive the derivative of the cap.
    """
    code, block = job.code, (scores, first, count, start, n_keys)
    # The order matters: capped, a hidden score would be -softcap, which is visible, and a bias in front of the cap
    # would be capped as well.
    with code.when(job[words.CAPPED] != 0):
        softcap = float_in(job, words.SOFTCAP)
        cap(code, scores, softcap, 0 if slopes is None else slopes, n_keys, count, differentiates=slopes is not None)
    with code.when(job[words.BIASED] != 0):
        _add_bias(code, job, head, *block)
    hide_outside(code, job, *block, bounds)
    with code.when(job[words.MASKED] != 0):
        _hide_masked(code, job, head, *block)
    with code.when(job[words.DOCUMENTED] != 0):
        _hide_other_documents(code, job, head // job[words.HEADS], *block)


def _score(scores: Value, key: Value, query: Value) -> Value:
    """Return the address of a score of the block."""
    return scores + 4 * (key * QUERIES + query)


@routine
def _add_bias(
    code: Code, address: Value, head: Value, scores: Value, first: Value, count: Value, start: Value, n_keys: Value
) -> None:
    """Add the bias to the scores of the queries from `first` and of the keys from `start` on."""
    job = job_at(code, address)
    bias, of_query, of_key = place_in(job, head, words.BIAS, words.BIAS_SPAN)

    def at(i: Value, j: Value) -> Value:
        return bias + 4 * ((first + i) * of_query + (start + j) * of_key)

    def square(j: Value, i: Value) -> None:
        lines = [code.load(at(i + line, j), _VECTOR) for line in range(LANES)]
        for key, numbers in enumerate(transpose_registers(code, lines)):
            score = _score(scores, j + key, i)
            code.store(code.load(score, _VECTOR) + numbers, score)

    def single(j: Value, i: Value) -> None:
        score = _score(scores, j, i)
        code.store(code.load(score, FLOAT) + code.load(at(i, j), FLOAT), score)

    with code.either(of_query == 0) as (for_all, for_each):
        with for_all, code.loop(0, n_keys) as j:
            number = code.vector(code.load(at(code.value(0), j), FLOAT), LANES)
            for i in range(0, QUERIES, LANES):
                score = _score(scores, j, code.value(i))
                code.store(code.load(score, _VECTOR) + number, score)
        with for_each:
            over_tiles(code, n_keys, count, square, single)


@routine
def add_to_gradient_of_bias(
    code: Code, address: Value, head: Value, d_scores: Value, first: Value, count: Value, start: Value, n_keys: Value
) -> None:
    """Add the gradients of scores to those of the bias, which are separate for every head."""
    job = job_at(code, address)
    d_bias, of_query = gradient_of_bias(job, head)

    def at(i: Value, j: Value) -> Value:
        return d_bias + 4 * ((first + i) * of_query + start + j)

    def add(numbers: Value, i: Value, j: Value) -> None:
        code.store(code.load(at(i, j), numbers.type) + numbers, at(i, j))

    def square(j: Value, i: Value) -> None:
        lines = transpose_registers(code, [code.load(_score(d_scores, j + line, i), _VECTOR) for line in range(LANES)])
        with code.either(of_query == 0) as (for_all, for_each):
            with for_all:
                total = lines[0]
                for line in lines[1:]:
                    total = total + line
                add(total, i, j)
            with for_each:
                for query, line in enumerate(lines):
                    add(line, i + query, j)

    over_tiles(code, n_keys, count, square, lambda j, i: add(code.load(_score(d_scores, j, i), FLOAT), i, j))


def gradient_of_bias(job: Array, head: Value) -> tuple[Value, Value]:
    """Return the address of the gradient of a head's bias, and its stride along queries, 0 if they share a row."""
    code, heads, keys = job.code, job[words.HEADS], job[words.KEYS]
    with_queries = job[words.BIAS_QUERY] != 0
    sequence = head // heads // code.choose(with_queries, job[words.BIAS_SPAN], 1)
    rows = code.choose(with_queries, job[words.QUERIES], 1)
    offset = (sequence * heads + head % heads) * rows * keys
    return job[words.D_BIAS] + 4 * offset, code.choose(with_queries, keys, 0)


@routine
def hide_outside(
    code: Code, address: Value, scores: Value, first: Value, count: Value, start: Value, n_keys: Value, bounds: Value
) -> None:
    """Set the scores of keys from `start` on outside the intervals of the queries from `first` on to minus infinity.

    `bounds` is a workspace of two numbers per query.
    """
    job = job_at(code, address)
    low, high = seen_by(job, first + count - 1)[0], seen_by(job, first)[1]
    with code.when((start < low) | (start + n_keys > high)):
        of_queries = Array(code, bounds)
        with code.loop(0, QUERIES) as i:
            for score, key in zip((i, i + QUERIES), seen_by(job, first + i), strict=True):
                # In float32 only small numbers are exact.
                among = code.largest(code.least(key - start, n_keys), 0)
                of_queries[score] = among.as_float()
        with code.loop(0, n_keys) as j, code.loop(0, QUERIES, LANES) as i:
            key, score = code.vector(j.as_float(), LANES), _score(scores, j, i)
            after, before = (code.load(of_queries.at(at), _VECTOR) for at in (i, i + QUERIES))
            seen = (after <= key) & (key < before)
            code.store(code.choose(seen, code.load(score, _VECTOR), _HIDDEN), score)


@routine
def _hide_masked(
    code: Code, address: Value, head: Value, scores: Value, first: Value, count: Value, start: Value, n_keys: Value
) -> None:
    """Set the scores of keys from `start` on that the mask hides from the queries from `first` on to minus infinity."""
    job = job_at(code, address)
    mask, of_query, of_key = place_in(job, head, words.MASK, words.MASK_SPAN)

    def hidden(i: Value, j: Value, kind: ir.Type) -> Value:
        score = mask + (first + i) * of_query + (start + j) * of_key
        return code.load(score, kind, align=1) == 0

    def square(j: Value, i: Value) -> None:
        seen, unseen = (code.vector(number, LANES) for number in (0.0, _HIDDEN))
        of_lines = [hidden(i + line, j, ir.VectorType(_BYTE, LANES)) for line in range(LANES)]
        # `transpose_registers` takes float32 alone: each byte becomes 0 or -inf first.
        lines = [code.choose(of_line, unseen, seen) for of_line in of_lines]
        for key, numbers in enumerate(transpose_registers(code, lines)):
            score = _score(scores, j + key, i)
            code.store(code.choose(numbers < 0.0, unseen, code.load(score, _VECTOR)), score)

    def single(j: Value, i: Value) -> None:
        score = _score(scores, j, i)
        code.store(code.choose(hidden(i, j, _BYTE), _HIDDEN, code.load(score, FLOAT)), score)

    with code.either(of_query == 0) as (for_all, for_each):
        with for_all, code.loop(0, n_keys) as j, code.when(hidden(code.value(0), j, _BYTE)):
            fill(code, _score(scores, j, code.value(0)), QUERIES, _HIDDEN)
        # Where all keys share a byte, a register of neighbouring bytes would be those of other queries.
        with for_each, code.either(of_key == 0) as (alike, apart):
            with alike, code.loop(0, n_keys) as j, code.loop(0, count) as i:
                single(j, i)
            with apart:
                over_tiles(code, n_keys, count, square, single)


def ids_of(job: Array, sequence: Value) -> tuple[Value, Value]:
    """Return where the numbers of the documents of a sequence's queries and of its keys are."""
    code, kinds = job.code, ((words.QUERY_IDS, words.QUERIES), (words.KEY_IDS, words.KEYS))
    spans = (words.QUERY_IDS_SPAN, words.KEY_IDS_SPAN)
    of_queries, of_keys = (
        job[ids] + 4 * (sequence // job[span] * job[size]) for (ids, size), span in zip(kinds, spans, strict=True)
    )
    return code.value(of_queries), code.value(of_keys)


def may_see(job: Array, sequence: Value, first: Value, count: Value, start: Value, n_keys: Value) -> Value:
    """Return whether some of the queries from `first` on may be of the document of some of the keys from `start` on."""
    code = job.code
    answer = code.variable(1)
    with code.when(job[words.DOCUMENTED] != 0):
        ends = code.stack(4)
        of_queries, of_keys = ids_of(job, sequence)
        _find_ends(code, of_queries + 4 * first, count, ends)
        _find_ends(code, of_keys + 4 * start, n_keys, ends.at(2))
        # Ranges of numbers that intersect need not have a number in common: this may only say yes too often, and
        # `_hide_other_documents` compares each pair.
        answer.set(code.choose((ends[0] <= ends[3]) & (ends[2] <= ends[1]), 1, 0))
    return answer.get() != 0


@routine
def _find_ends(code: Code, ids: Value, count: Value, out: Value) -> None:
    """Write the smallest and the largest of `count` numbers as words."""
    number = code.load(ids, _INT).as_word()
    least, largest = code.variable(number), code.variable(number)
    with code.loop(1, count) as i:
        number = code.load(ids + 4 * i, _INT).as_word()
        least.set(code.least(number, least.get()))
        largest.set(code.largest(number, largest.get()))
    ends = Array(code, out, WORD)
    ends[0], ends[1] = least.get(), largest.get()


@routine
def _hide_other_documents(
    code: Code, address: Value, sequence: Value, scores: Value, first: Value, count: Value, start: Value, n_keys: Value
) -> None:
    """Set the scores of keys from `start` on of other documents than the queries' from `first` on to minus infinity."""
    of_queries, of_keys = ids_of(job_at(code, address), sequence)
    whole = count // LANES * LANES

    def hide(i: Value, j: Value, number: Value) -> None:
        address_of_score = _score(scores, j, i)
        is_same = code.load(of_queries + 4 * (first + i), number.type) == number
        score = code.load(address_of_score, like(number.type, FLOAT))
        code.store(code.choose(is_same, score, _HIDDEN), address_of_score)

    with code.loop(0, n_keys) as j:
        number = code.load(of_keys + 4 * (start + j), _INT)
        with code.loop(0, whole, LANES) as i:
            hide(i, j, code.vector(number, LANES))
        with code.loop(whole, count) as i:
            hide(i, j, number)
