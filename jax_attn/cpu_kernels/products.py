"""Matrix products of float32 whose sums stay in the processor's registers.

A tile of the result, `ROWS` rows of a few registers each, is held while the products along the depth are added to it:
each step loads one row of the right side and one number per row of the left. Written in LLVM's vectors, as Numba has
none; it fuses products and sums on every processor.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiling import compiled, stay_apart
from .memory import spread
from .processor import LANES, ROWS, VECTORS

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_WORD = ir.IntType(64)


def _tile(vectors: int, *, adds: bool) -> Any:
    """Return what computes a tile of `vectors` registers a row, into memory or added to what lies there."""

    @intrinsic
    def tile(typing_context: Any, left: Any, row: Any, step: Any, right: Any, width: Any, out: Any, line: Any, n: Any):
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            left, row, step, right, width, out, line, depth = arguments
            kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
            fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")

            def address(base: ir.Value, stride: ir.Value, count: int) -> ir.Value:
                return builder.add(base, builder.mul(stride, _WORD(4 * count)))

            def memory(address: ir.Value, kind: ir.Type = _VECTOR) -> ir.Value:
                return builder.inttoptr(address, kind.as_pointer())

            rows = [address(_WORD(0), row, r) for r in range(ROWS)]
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            count, a, b = (builder.phi(_WORD) for _ in range(3))
            sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(ROWS)]
            b_row = [builder.load(memory(address(b, _WORD(LANES), v)), align=4) for v in range(vectors)]
            totals = []
            for offset, of_row in zip(rows, sums, strict=True):
                number = builder.load(memory(builder.add(a, offset), ir.FloatType()), align=4)
                numbers = spread(builder, number)
                totals.append([builder.call(fused, [numbers, b, old]) for b, old in zip(b_row, of_row, strict=True)])
            following = builder.add(count, _WORD(1))
            for phi, start, then in [
                (count, _WORD(0), following),
                (a, left, address(a, step, 1)),
                (b, right, address(b, width, 1)),
                *zip(chain(*sums), repeat(ir.Constant(_VECTOR, None)), chain(*totals), strict=False),
            ]:
                phi.add_incoming(start, before)
                phi.add_incoming(then, loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
            builder.position_at_end(after)
            for r, of_row in enumerate(totals):
                for v, total in enumerate(of_row):
                    place = memory(address(address(out, line, r), _WORD(LANES), v))
                    if adds:
                        total = builder.fadd(builder.load(place, align=4), total)
                    builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return tile


def _columns(vectors: int, *, adds: bool) -> Any:
    """Return what computes all rows of a few registers' columns."""
    tile = _tile(vectors, adds=adds)

    @compiled
    def columns(left, row, step, right, width, out, line, rows, depth):
        for r in range(0, rows, ROWS):
            tile(left + 4 * r * row, row, step, right, width, out + 4 * r * line, line, depth)

    return columns


_store_wide = _columns(VECTORS, adds=False)
_add_wide, _add_pair, _add_one = (_columns(vectors, adds=True) for vectors in (VECTORS, 2, 1))


@compiled
def product(left, row, step, right, width, out, line, rows, registers, depth):
    """Compute ``out[r, c] = sum_k left[r, k] * right[k, c]`` for `registers` times `LANES` columns.

    ``left[r, k]`` lies at ``left + 4 * (r * row + k * step)``, rows of `right` are `width` apart, and
    those of `out` `line`. As many rows are written as fill the tiles. `depth` is at least 1, and `registers` a multiple
    of `VECTORS`.
    """
    stay_apart()
    for done in range(0, registers, VECTORS):
        at = 4 * LANES * done
        _store_wide(left, row, step, right + at, width, out + at, line, rows, depth)


@compiled
def add_product(left, row, step, right, width, out, line, rows, registers, depth):
    """Add a `product` to what lies in `out`, for any number of registers."""
    stay_apart()
    done = 0
    while registers - done >= VECTORS:
        at = 4 * LANES * done
        _add_wide(left, row, step, right + at, width, out + at, line, rows, depth)
        done += VECTORS
    if registers - done >= 2:
        at = 4 * LANES * done
        _add_pair(left, row, step, right + at, width, out + at, line, rows, depth)
        done += 2
    if registers > done:
        at = 4 * LANES * done
        _add_one(left, row, step, right + at, width, out + at, line, rows, depth)
