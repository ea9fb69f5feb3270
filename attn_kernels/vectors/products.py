"""Matrix products of float32 whose sums stay in the processor's registers.

A tile of the result, `ROWS` rows of a few registers each, is held while the products along the depth are added to it:
each step loads one row of the right side and one number per row of the left.
"""

from __future__ import annotations

from llvmlite import ir

from ..compiler.language import FLOAT, Code, Value, routine
from ..compiler.processor import LANES, ROWS, VECTORS

_VECTOR = ir.VectorType(FLOAT, LANES)
# Bytes of a register full of float32.
_REGISTER = 4 * LANES


@routine
def _columns(
    code: Code,
    left: Value,
    stride: Value,
    right: Value,
    width: Value,
    out: Value,
    line: Value,
    rows: Value,
    depth: Value,
    *,
    vectors: int,
    adds: bool,
    row: int,
    step: int,
) -> None:
    """Compute all rows of a few registers' columns, into memory or added to what lies there."""
    with code.loop(0, rows, ROWS) as first:
        zero = code.vector(0.0, LANES)
        sums = [[code.variable(zero) for _ in range(vectors)] for _ in range(ROWS)]
        between = code.value(row) if row else stride
        of_rows = [4 * r * between for r in range(ROWS)]
        a, b = code.variable(left + 4 * first * between), code.variable(right)
        with code.loop(0, depth):
            b_row = [code.load(b.get() + _REGISTER * v, _VECTOR) for v in range(vectors)]
            for of_row, offset in zip(sums, of_rows, strict=True):
                number = code.vector(code.load(a.get() + offset, FLOAT), LANES)
                for total, vector in zip(of_row, b_row, strict=True):
                    total.set(code.times_plus(number, vector, total.get()))
            a.set(a.get() + 4 * step)
            b.set(b.get() + 4 * width)
        for r, of_row in enumerate(sums):
            for v, total in enumerate(of_row):
                target = out + 4 * (first + r) * line + _REGISTER * v
                code.store(code.load(target, _VECTOR) + total.get() if adds else total.get(), target)


@routine
def product(
    code: Code,
    left: Value,
    stride: Value,
    right: Value,
    width: Value,
    out: Value,
    line: Value,
    rows: Value,
    registers: Value,
    depth: Value,
    *,
    adds: bool,
    row: int = 0,
    step: int = 1,
    widest: int = VECTORS,
) -> None:
    """Compute ``out[r, c] = sum_k left[r, k] * right[k, c]`` for `registers` times `LANES` columns.

    ``left[r, k]`` is at ``left + 4 * (r * row + k * step)``, with `stride` for a `row` of 0; compile-time constants are
    faster. Rows of `right` are `width` apart, and those of `out` `line`. The rows written are rounded up to whole
    tiles. With `adds` the product is added to the contents of `out`; without, `registers` is a multiple of `widest`,
    the most registers in a row of a tile.
    """
    done = code.value(0)
    for vectors in sorted({widest, 2, 1}, reverse=True) if adds else [widest]:
        end = done + (registers - done) // vectors * vectors
        with code.loop(done * _REGISTER, end * _REGISTER, vectors * _REGISTER) as at:
            constants = {"vectors": vectors, "adds": adds, "row": row, "step": step}
            _columns(code, left, stride, right + at, width, out + at, line, rows, depth, **constants)
        done = end
