"""Scores of a block of keys become weights, row by row, the keys in the lanes of the registers.

A row is a query of a head: those of one key head follow each other, and of one query head. Scores of a row and of the
next are `BLOCK` numbers apart.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from llvmlite import ir

from .. import words
from ..compiler.language import FLOAT, Array, Code, Value, routine
from ..compiler.processor import LANES
from ..flash.blocks import float_in, job_at, seen_by
from ..flash.scores import ids_of, place_in
from ..vectors.exponentials import exp, tanh
from .products import BLOCK

_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_VECTOR = ir.VectorType(FLOAT, LANES)
_HIDDEN = float("-inf")


@routine
def complete(code: Code, address: Value, head: Value, scores: Value, rows: Value, start: Value, n_keys: Value) -> None:
    """Apply cap, bias and masks to the products of the rows from a head on and the keys from `start` on.

    Heads are counted over all sequences.
    """
    job = job_at(code, address)
    queries = job[words.QUERIES]
    with code.loop(0, rows) as r:
        of_head, query, line = head + r // queries, r % queries, Array(code, scores + 4 * r * BLOCK)
        with code.when(job[words.CAPPED] != 0):
            _cap(code, job, line, n_keys)
        with code.when(job[words.BIASED] != 0):
            _add_bias(code, job, line, of_head, query, start, n_keys)
        with code.when(job[words.BOUNDS] != 0):
            low, high = (code.largest(code.least(key - start, n_keys), 0) for key in seen_by(job, query))
            for first, last in ((0, low), (high, n_keys)):
                with code.loop(first, last) as j:
                    line[j] = _HIDDEN
        with code.when(job[words.MASKED] != 0):
            _hide_masked(code, job, line, of_head, query, start, n_keys)
        with code.when(job[words.DOCUMENTED] != 0):
            _hide_other_documents(code, job, line, of_head // job[words.HEADS], query, start, n_keys)


def _along(code: Code, n_keys: Value, some: Callable[[Value, int], None]) -> None:
    """Emit code for the first `n_keys` keys, in steps of `LANES` keys and then of 1."""
    whole = n_keys // LANES * LANES
    for start, end, lanes in ((0, whole, LANES), (whole, n_keys, 1)):
        with code.loop(start, end, lanes) as j:
            some(j, lanes)


def _kind(element: ir.Type, lanes: int) -> ir.Type:
    """Return the type of a vector of `lanes` elements, or of the element itself for one lane."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def _spread(code: Code, number: Value, lanes: int) -> Value:
    return number if lanes == 1 else code.vector(number, lanes)


def _cap(code: Code, job: Array, line: Array, n_keys: Value) -> None:
    softcap = float_in(job, words.SOFTCAP)
    bound, inverse = (code.vector(number, LANES) for number in (softcap, 1.0 / softcap))
    with code.loop(0, n_keys, LANES) as j:  # beyond the last there is room, too
        code.store(tanh(code.load(line.at(j), _VECTOR) * inverse) * bound, line.at(j))


def _add_bias(code: Code, job: Array, line: Array, head: Value, query: Value, start: Value, n_keys: Value) -> None:
    bias, of_query, of_key = place_in(job, head, words.BIAS, words.BIAS_SPAN)
    source = bias + 4 * (query * of_query + start * of_key)

    def some(j: Value, lanes: int) -> None:
        kind = _kind(FLOAT, lanes)
        code.store(code.load(line.at(j), kind) + code.load(source + 4 * j * of_key, kind), line.at(j))

    _along(code, n_keys, some)


def _hide_masked(code: Code, job: Array, line: Array, head: Value, query: Value, start: Value, n_keys: Value) -> None:
    mask, of_query, of_key = place_in(job, head, words.MASK, words.MASK_SPAN)
    source = mask + query * of_query + start * of_key

    def some(j: Value, lanes: int) -> None:
        score = code.load(line.at(j), _kind(FLOAT, lanes))
        hidden = code.load(source + j, _kind(_BYTE, lanes), align=1) == 0
        code.store(code.choose(hidden, _HIDDEN, score), line.at(j))

    with code.either(of_key == 0) as (alike, apart):
        with alike, code.when(code.load(source, _BYTE, align=1) == 0), code.loop(0, n_keys) as j:
            line[j] = _HIDDEN
        with apart:
            _along(code, n_keys, some)


def _hide_other_documents(
    code: Code, job: Array, line: Array, sequence: Value, query: Value, start: Value, n_keys: Value
) -> None:
    of_queries, of_keys = ids_of(job, sequence)
    number = code.load(of_queries + 4 * query, _INT)

    def some(j: Value, lanes: int) -> None:
        is_same = code.load(of_keys + 4 * (start + j), _kind(_INT, lanes)) == _spread(code, number, lanes)
        code.store(code.choose(is_same, code.load(line.at(j), _kind(FLOAT, lanes)), _HIDDEN), line.at(j))

    _along(code, n_keys, some)


def may_see(job: Array, head: Value, heads: Value, start: Value, n_keys: Value) -> Value:
    """Return whether the mask shows any of the keys from `start` on to any query of `heads` heads from `head` on."""
    code = job.code
    answer = code.variable(1)
    with code.when(job[words.MASKED] != 0):
        seen = code.stack(1)
        _look(code, job, head, heads, start, n_keys, seen)
        answer.set(seen[0])
    return answer.get() != 0


@routine
def _look(code: Code, address: Value, head: Value, heads: Value, start: Value, n_keys: Value, out: Value) -> None:
    """Write a word that is 0 where a mask hides all keys from `start` on from all queries of some heads."""
    job = job_at(code, address)
    visible, wide = code.variable(0), code.variable(code.vector(0, LANES).low_bits(_BYTE))
    of_heads = code.choose(job[words.MASK_HEAD] == 0, 1, heads)
    of_queries = code.choose(job[words.MASK_QUERY] == 0, 1, job[words.QUERIES])
    with code.loop(0, of_heads) as h, code.loop(0, of_queries) as query:
        mask, of_query, of_key = place_in(job, head + h, words.MASK, words.MASK_SPAN)
        source = mask + query * of_query + start * of_key

        def some(j: Value, lanes: int, source: Value = source) -> None:
            seen = code.load(source + j, _kind(_BYTE, lanes), align=1)
            if lanes == 1:
                visible.set(visible.get() | seen.as_word())
            else:
                wide.set(wide.get() | seen)

        _along(code, code.choose(of_key == 0, 1, n_keys), some)
    for lane in range(LANES):
        any_visible = Value(code, code.builder.extract_element(wide.get().ir, ir.Constant(_INT, lane)))
        visible.set(visible.get() | any_visible.as_word())
    Array(code, out, ir.IntType(64))[0] = visible.get()


@routine
def weigh(code: Code, scores: Value, rows: Value, n_keys: Value, tops: Value, line: Value, factors: Value) -> None:
    """Turn rows of scores into weights relative to the largest score so far, and add them to their sums.

    The largest scores are `line` apart, each followed by its sum. `factors` receive the corrections of results relative
    to an older largest score. A NaN stays a NaN in the weights.
    """
    whole = (n_keys + (LANES - 1)) // LANES * LANES
    with code.loop(0, rows) as r:
        row, tops_of_rows = Array(code, scores + 4 * r * BLOCK), Array(code, tops + 4 * r * line)
        with code.loop(n_keys, whole) as j:
            # Lanes behind the last key hold products of zeros: hidden, they weigh exp(-inf) = 0.
            row[j] = _HIDDEN
        old, highest = tops_of_rows[0], code.variable(code.vector(_HIDDEN, LANES))
        with code.loop(0, whole, LANES) as j:
            highest.set(code.largest(code.load(row.at(j), _VECTOR), highest.get()))
        top = code.largest(_over_lanes(code, highest.get(), code.largest), old)
        # As in `flash.softmax.weigh`: -inf - -inf would be NaN.
        safe = code.choose(top > _HIDDEN, top, 0.0)
        shift, total = code.vector(safe, LANES), code.variable(code.vector(0.0, LANES))
        with code.loop(0, whole, LANES) as j:
            weight = exp(code.load(row.at(j), _VECTOR) - shift)
            code.store(weight, row.at(j))
            total.set(total.get() + weight)
        factor = exp(old - safe)
        tops_of_rows[1] = code.times_plus(tops_of_rows[1], factor, _over_lanes(code, total.get(), operator.add))
        tops_of_rows[0] = top
        Array(code, factors)[r] = factor


def _over_lanes(code: Code, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
    """Return the reduction of a register's lanes by `join`."""
    step = LANES // 2
    while step:
        vector = join(vector, code.shuffle(vector, vector, [(lane + step) % LANES for lane in range(LANES)]))
        step //= 2
    return Value(code, code.builder.extract_element(vector.ir, ir.Constant(_INT, 0)))
