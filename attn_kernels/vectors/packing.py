"""Numbers of bfloat16 in the layouts that `pairs.product` takes: rows of them, and rows of pairs.

Addresses count bytes, sizes numbers. Columns fill registers, and rows go in twos.
"""

from __future__ import annotations

from llvmlite import ir

from ..compiler.language import FLOAT, Code, Value, routine
from ..compiler.processor import LANES
from .memory import fetch_ahead, nearest_bits

_SHORT, _INT = ir.IntType(16), ir.IntType(32)
_FLOATS, _SHORTS, _INTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, _SHORT, _INT))

# The bits of a float32 that bfloat16 keeps: sign, exponent and the 7 upper ones of the mantissa.
_UPPER = -(2**16)


@routine
def read_shorts(
    code: Code,
    source: Value,
    stride: Value,
    rows: Value,
    columns: Value,
    target: Value,
    width: Value,
    first: Value,
    size: Value,
) -> None:
    """Fill `size` rows of 16-bit numbers, each `width` long, with `rows` unchanged rows of `columns`, from `first` on.

    All other numbers become 0.
    """
    line = 2 * width
    code.call("memset", target, 0, first * line)
    with code.loop(0, rows) as r:
        row, read = target + (first + r) * line, source + 2 * r * stride
        fetch_ahead(code, read, 2 * stride, 2 * columns)
        code.call("memcpy", row, read, 2 * columns)
        with code.when(columns < width):
            code.call("memset", row + 2 * columns, 0, line - 2 * columns)
    code.call("memset", target + (first + rows) * line, 0, (size - first - rows) * line)


def rows_as_pairs(code: Code, source: Value, width: Value) -> Value:
    """Return the pairs of a register of 16-bit numbers and the one in the row below."""
    low, high = (
        Value(code, code.builder.zext(code.load(place, _SHORTS, align=2).ir, _INTS))
        for place in (source, source + 2 * width)
    )
    return low | (high << 16)


@routine
def pair_rows(code: Code, source: Value, rows: Value, columns: Value, out: Value) -> None:
    """Fill `out` with the pairs of 16-bit numbers that lie above each other in two neighbouring rows."""
    with code.loop(0, rows, 2) as r, code.loop(0, columns, LANES) as c:
        code.store(rows_as_pairs(code, source + 2 * (r * columns + c), columns), out + 4 * (r // 2 * columns + c))


@routine
def round_to_pairs(code: Code, source: Value, rows: Value, columns: Value, out: Value) -> None:
    """Fill `out` with the pairs of numbers of float32 in two neighbouring rows, rounded."""
    with code.loop(0, rows, 2) as r, code.loop(0, columns, LANES) as c:
        low, high = _two_rows(code, source, r, columns, c)
        code.store(_joined(low, high), out + 4 * (r // 2 * columns + c))


@routine
def round_to_pairs_twice(code: Code, source: Value, rows: Value, columns: Value, out: Value, rests: Value) -> None:
    """Fill `out` as `round_to_pairs` does, and `rests` with what rounding took away, rounded as well."""
    with code.loop(0, rows, 2) as r, code.loop(0, columns, LANES) as c:
        rows_pair = _two_rows(code, source, r, columns, c)
        target = 4 * (r // 2 * columns + c)
        code.store(_joined(*rows_pair), out + target)
        losses = [one - (nearest_bits(one) & _UPPER).bits_as(one.type) for one in rows_pair]
        # Of an infinity, nothing.
        code.store(_joined(*(code.choose(one - one == 0.0, one, 0.0) for one in losses)), rests + target)


def _two_rows(code: Code, source: Value, row: Value, columns: Value, column: Value) -> list[Value]:
    return [code.load(source + 4 * ((row + n) * columns + column), _FLOATS) for n in range(2)]


def _joined(low: Value, high: Value) -> Value:
    """Return words of two bfloat16 each, rounded from float32: `low` in the low half, `high` in the high one."""
    return (nearest_bits(low) >> 16) | (nearest_bits(high) & _UPPER)
