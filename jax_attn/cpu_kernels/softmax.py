"""The softmax of a block of scores, forward and backward, with the queries in the lanes of the registers.

Scores have the keys in rows of `QUERIES`; what belongs to a query lies in an array of its own of as many numbers.
Written in LLVM's vectors like `products`: a compiler that chooses for itself takes registers half as wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiling import compiled, stay_apart
from .processor import LANES

QUERIES = 64
"""Queries that go through the keys together: a whole number of registers on every processor."""

TOGETHER = 4
"""Registers worked on at once, as each waits for what it computed just before."""

PART = 12
"""Rows whose sum is put together before it is added: the rounding error of a sum grows with the root of its length."""

_ROW = 4 * QUERIES

_FLOAT, _WORD, _INT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _Writer:
    """Writes the instructions of one function: arithmetic of vectors, and loops over rows."""

    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        self.fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")

    def number(self, value: float) -> ir.Value:
        """Return a vector of one number."""
        return ir.Constant(_VECTOR, [value] * LANES)

    def load(self, address: ir.Value) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, _VECTOR.as_pointer()), align=4)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.builder.store(value, self.builder.inttoptr(address, _VECTOR.as_pointer()), align=4)

    def times_plus(self, one: ir.Value, two: ir.Value, three: ir.Value) -> ir.Value:
        return self.builder.call(self.fused, [one, two, three])

    def larger(self, one: ir.Value, two: ir.Value) -> ir.Value:
        """Return the larger of two, the second one where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", one, two), one, two)

    def exp(self, x: ir.Value) -> ir.Value:
        """Return the exponential within 1e-7 of itself; below e**-87.3, the least number of full precision, it is 0.

        The polynomial on plus or minus log(2) / 2 is that of Cephes' expf.
        """
        build = self.builder
        magic = self.number(12582912.0)  # 1.5 * 2**23: the sum's last bits are the nearest whole number
        shifted = self.times_plus(x, self.number(1.4426950408889634), magic)
        power = build.fsub(shifted, magic)
        rest = self.times_plus(power, self.number(-0.693145751953125), x)
        rest = self.times_plus(power, self.number(-1.428606765330187e-06), rest)
        total = self.number(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            total = self.times_plus(total, rest, self.number(factor))
        total = self.times_plus(total, build.fmul(rest, rest), rest)
        total = build.fadd(total, self.number(1.0))
        bits = build.shl(build.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * LANES))
        scaled = build.bitcast(build.add(build.bitcast(total, _INTS), bits), _VECTOR)
        vanishes = build.fcmp_ordered("<", x, self.number(-87.3))
        scaled = build.select(vanishes, self.number(0.0), scaled)
        return build.select(build.fcmp_unordered("uno", x, x), x, scaled)

    def over_rows(self, count: ir.Value, kept: list[ir.Value], body: Callable[[ir.Value, list[ir.Value]], Any]) -> Any:
        """Write a loop: `body` takes the offset of a row and what is kept, and returns what is kept then."""
        return self._loop(_WORD(0), self.builder.mul(count, _WORD(_ROW)), _ROW, kept, body)

    def sums_over_rows(self, count: ir.Value, body: Callable[[ir.Value, list[ir.Value]], Any]) -> Any:
        """Write a loop over rows that adds up what `body` adds to what is kept, `PART` rows at a time."""
        build = self.builder
        end = build.mul(count, _WORD(_ROW))
        zeros = [self.number(0.0)] * TOGETHER

        def part(start: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            stop = build.add(start, _WORD(PART * _ROW))
            stop = build.select(build.icmp_signed("<", stop, end), stop, end)
            parts = self._loop(start, stop, _ROW, zeros, body)
            return [build.fadd(total, part) for total, part in zip(totals, parts, strict=True)]

        return self._loop(_WORD(0), end, PART * _ROW, zeros, part)

    def _loop(self, start: ir.Value, end: ir.Value, step: int, kept: list[ir.Value], body: Callable[..., Any]) -> Any:
        build = self.builder
        before = build.block
        head, inside, after = (build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        offset = build.phi(_WORD)
        phis = [build.phi(value.type) for value in kept]
        build.cbranch(build.icmp_signed("<", offset, end), inside, after)
        build.position_at_end(inside)
        then = body(offset, phis)
        following = build.add(offset, _WORD(step))
        for phi, first, value in zip([offset, *phis], [start, *kept], [following, *then], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, build.block)
        build.branch(head)
        build.position_at_end(after)
        return phis


def _of_lanes(write: Callable[..., None]) -> Any:
    """Return a function of a tuple, addresses and then a number of rows, that works on `TOGETHER` registers.

    `write` gets a `_Writer`, the addresses of each register, and the number of rows.
    """

    @intrinsic
    def function(typing_context: Any, given: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            *addresses, count = cgutils.unpack_tuple(builder, arguments[0])
            steps = [_WORD(4 * LANES * v) for v in range(TOGETHER)]
            write(_Writer(builder), *([builder.add(one, step) for step in steps] for one in addresses), count)
            return context.get_dummy_value()

        return types.void(given), generate

    return function


def _write_weigh(writer: _Writer, scores: Any, tops: Any, sums: Any, shrink: Any, count: Any) -> None:
    build = writer.builder
    none = writer.number(float("-inf"))
    old = [writer.load(at) for at in tops]

    def find(offset: Any, found: Any) -> Any:
        return [writer.larger(writer.load(build.add(at, offset)), top) for at, top in zip(scores, found, strict=True)]

    new = writer.over_rows(count, old, find)
    safe = [build.select(build.fcmp_ordered(">", top, none), top, writer.number(0.0)) for top in new]

    def exponentials(offset: Any, parts: Any) -> Any:
        results = []
        for at, top, part in zip(scores, safe, parts, strict=True):
            weight = writer.exp(build.fsub(writer.load(build.add(at, offset)), top))
            writer.store(weight, build.add(at, offset))
            results.append(build.fadd(part, weight))
        return results

    parts = writer.sums_over_rows(count, exponentials)
    for v, part in enumerate(parts):
        factor = writer.exp(build.fsub(old[v], safe[v]))
        writer.store(writer.times_plus(writer.load(sums[v]), factor, part), sums[v])
        writer.store(factor, shrink[v])
        writer.store(new[v], tops[v])


def _write_weigh_again(writer: _Writer, scores: Any, d_weights: Any, tops: Any, slopes: Any, count: Any) -> None:
    build = writer.builder
    known = [writer.load(at) for at in tops]

    def step(offset: Any, parts: Any) -> Any:
        results = []
        for at, other, top, part in zip(scores, d_weights, known, parts, strict=True):
            weight = writer.exp(build.fsub(writer.load(build.add(at, offset)), top))
            writer.store(weight, build.add(at, offset))
            results.append(writer.times_plus(weight, writer.load(build.add(other, offset)), part))
        return results

    for at, part in zip(slopes, writer.sums_over_rows(count, step), strict=True):
        writer.store(build.fadd(writer.load(at), part), at)


def _write_slope(writer: _Writer, weights: Any, d_weights: Any, slopes: Any, count: Any) -> None:
    build = writer.builder
    known = [writer.load(at) for at in slopes]

    def step(offset: Any, kept: Any) -> Any:
        for at, other, slope in zip(weights, d_weights, known, strict=True):
            at, other = build.add(at, offset), build.add(other, offset)
            writer.store(build.fmul(writer.load(at), build.fsub(writer.load(other), slope)), other)
        return kept

    writer.over_rows(count, [], step)


_weigh = _of_lanes(_write_weigh)
_weigh_again = _of_lanes(_write_weigh_again)
_slope = _of_lanes(_write_slope)
_STEP = 4 * LANES * TOGETHER


@compiled
def weigh(scores, tops, sums, shrink, count):
    """Turn `count` rows of scores into weights under the largest score so far, and add them to the sums.

    `shrink` becomes the factor of what was weighed under an older largest score. A NaN stays one in the weights.
    """
    stay_apart()
    for lane in range(0, 4 * QUERIES, _STEP):
        _weigh((scores + lane, tops + lane, sums + lane, shrink + lane, count))


@compiled
def weigh_again(scores, d_weights, tops, slopes, count):
    """Turn `count` rows of scores into weights under a known shift, and add weights times `d_weights` to `slopes`."""
    stay_apart()
    for lane in range(0, 4 * QUERIES, _STEP):
        _weigh_again((scores + lane, d_weights + lane, tops + lane, slopes + lane, count))


@compiled
def differentiate(weights, d_weights, slopes, count):
    """Turn `count` rows of the gradients of weights into those of scores: ``weights * (d_weights - slopes)``."""
    stay_apart()
    for lane in range(0, 4 * QUERIES, _STEP):
        _slope((weights + lane, d_weights + lane, slopes + lane, count))
