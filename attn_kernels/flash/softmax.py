"""The softmax of a block of scores, forward and backward, with the queries in the lanes of the registers.

Scores have the keys in rows of `QUERIES`; per-query values are separate arrays of `QUERIES` numbers. Routines process
at least the first `queries` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

from ..compiler.language import FLOAT, Code, Value, routine
from ..compiler.processor import LANES
from ..vectors.exponentials import exp, slope_of_tanh, tanh

# `registers` goes through a row `TOGETHER` registers at a time, so 64 must be a multiple of `TOGETHER * LANES` (64 with
# AVX-512, 32, 16): a step beyond the row would write into that of the next key.
QUERIES = 64
"""Queries that go through the keys together: a whole number of registers on every processor."""

TOGETHER = 4
"""Registers processed at once, since each operation waits for the previous one on the same register."""

PART = 12
"""Rows whose sum is put together before it is added: the rounding error of a sum grows with the root of its length."""

# Bytes from a key's scores to the next key's: a float32 for each query.
_ROW = 4 * QUERIES

_VECTOR = ir.VectorType(FLOAT, LANES)


@contextmanager
def registers(code: Code, queries: Value) -> Iterator[list[Value]]:
    """Emit a loop over the first queries, `TOGETHER` registers at a time; yields the offsets of the registers."""
    register = 4 * LANES
    with code.loop(0, 4 * queries, TOGETHER * register) as lane:
        yield [lane + register * v for v in range(TOGETHER)]


def _sums(code: Code, count: Value, add: Callable[[int, Value, Value], Value]) -> list[Value]:
    """Return the sums over rows of each register's addends, `PART` rows at a time.

    `add` is called with the number of a register, the offset of a row, and the sum so far.
    """
    zero, end = code.vector(0.0, LANES), count * _ROW
    totals = [code.variable(zero) for _ in range(TOGETHER)]
    with code.loop(0, end, PART * _ROW) as start:
        parts = [code.variable(zero) for _ in range(TOGETHER)]
        with code.loop(start, code.least(start + PART * _ROW, end), _ROW) as row:
            for v, part in enumerate(parts):
                part.set(add(v, row, part.get()))
        for total, part in zip(totals, parts, strict=True):
            total.set(total.get() + part.get())
    return [total.get() for total in totals]


@routine
def weigh(code: Code, scores: Value, tops: Value, sums: Value, shrink: Value, count: Value, queries: Value) -> None:
    """Turn `count` rows of scores into weights relative to the largest score so far, and add them to the sums.

    `shrink` receives the correction of results relative to an older largest score. A NaN stays a NaN in the weights.
    """
    with registers(code, queries) as lanes:
        old = [code.load(tops + lane, _VECTOR) for lane in lanes]
        new = [code.variable(top) for top in old]
        with code.loop(0, count * _ROW, _ROW) as row:
            for lane, top in zip(lanes, new, strict=True):
                # `largest` returns its second operand for a NaN: the shift stays a number, and the NaN reaches the sum
                # through its own weight.
                top.set(code.largest(code.load(scores + lane + row, _VECTOR), top.get()))
        # A query that has seen no key has the largest score -inf, and -inf - -inf is NaN. Relative to 0 its weights are
        # exp(-inf) = 0.
        safe = [code.choose(top.get() > float("-inf"), top.get(), 0.0) for top in new]

        def add(v: int, row: Value, total: Value) -> Value:
            address = scores + lanes[v] + row
            weight = exp(code.load(address, _VECTOR) - safe[v])
            code.store(weight, address)
            return total + weight

        for lane, top, before, now, total in zip(lanes, new, old, safe, _sums(code, count, add), strict=True):
            # The correction of an online softmax (arXiv 1805.02867), exp(old - new); none before the first key, where
            # sum and context are 0.
            factor = code.choose(before > float("-inf"), exp(before - now), 1.0)
            code.store(code.times_plus(code.load(sums + lane, _VECTOR), factor, total), sums + lane)
            code.store(factor, shrink + lane)
            code.store(top.get(), tops + lane)


@routine
def weigh_again(
    code: Code, scores: Value, d_weights: Value, tops: Value, slopes: Value, count: Value, queries: Value
) -> None:
    """Turn `count` rows of scores into weights under a known shift, and add weights times `d_weights` to `slopes`."""
    with registers(code, queries) as lanes:
        loaded = [code.load(tops + lane, _VECTOR) for lane in lanes]

        def add(v: int, row: Value, total: Value) -> Value:
            address = scores + lanes[v] + row
            weight = exp(code.load(address, _VECTOR) - loaded[v])
            code.store(weight, address)
            return code.times_plus(weight, code.load(d_weights + lanes[v] + row, _VECTOR), total)

        for lane, total in zip(lanes, _sums(code, count, add), strict=True):
            code.store(code.load(slopes + lane, _VECTOR) + total, slopes + lane)


@routine
def differentiate(code: Code, weights: Value, d_weights: Value, slopes: Value, count: Value, queries: Value) -> None:
    """Turn `count` rows of the gradients of weights into those of scores: ``weights * (d_weights - slopes)``."""
    with registers(code, queries) as lanes:
        loaded = [code.load(slopes + lane, _VECTOR) for lane in lanes]
        with code.loop(0, count * _ROW, _ROW) as row:
            for lane, slope in zip(lanes, loaded, strict=True):
                address = d_weights + lane + row
                weight = code.load(weights + lane + row, _VECTOR)
                # The derivative of softmax: dS = P (dP - sum(P dP)), the sum being the slope.
                code.store(weight * (code.load(address, _VECTOR) - slope), address)


@routine
def cap(
    code: Code, scores: Value, softcap: Value, slopes: Value, count: Value, queries: Value, *, differentiates: bool
) -> None:
    """Turn `count` rows of scores into ``softcap * tanh(scores / softcap)``; `slopes` become the derivative."""
    with registers(code, queries) as lanes:
        bound, inverse = (code.vector(number, LANES) for number in (softcap, 1.0 / softcap))
        with code.loop(0, count * _ROW, _ROW) as row:
            for lane in lanes:
                share = code.load(scores + lane + row, _VECTOR) * inverse
                code.store(tanh(share) * bound, scores + lane + row)
                if differentiates:
                    # d/dx softcap * tanh(x / softcap): the two factors cancel.
                    code.store(slope_of_tanh(share), slopes + lane + row)


@routine
def multiply(code: Code, factors: Value, out: Value, count: Value, queries: Value) -> None:
    """Multiply `count` rows of `out` elementwise by as many rows of `factors`, for `queries` columns."""
    with registers(code, queries) as lanes, code.loop(0, count * _ROW, _ROW) as row:
        for lane in lanes:
            address = out + lane + row
            code.store(code.load(address, _VECTOR) * code.load(factors + lane + row, _VECTOR), address)


@routine
def multiply_lanes(code: Code, factors: Value, out: Value, count: Value, queries: Value) -> None:
    """Multiply each of `count` rows of `out` by the same row of factors, one for each query."""
    with registers(code, queries) as lanes:
        loaded = [code.load(factors + lane, _VECTOR) for lane in lanes]
        with code.loop(0, count * _ROW, _ROW) as row:
            for lane, factor in zip(lanes, loaded, strict=True):
                code.store(code.load(out + lane + row, _VECTOR) * factor, out + lane + row)
