"""Numbers read and written by address, as XLA hands memory over: float32, bfloat16 and float16, computed as float32.

Addresses count bytes, sizes and strides numbers. The kinds are `words.KINDS`.
"""

from __future__ import annotations

from llvmlite import ir

from .. import words
from ..compiler.language import FLOAT, Array, Code, Value, like, routine
from ..compiler.processor import LANES

_SHORT, _INT = ir.IntType(16), ir.IntType(32)
STORED = {"float32": FLOAT, "bfloat16": _SHORT, "float16": ir.HalfType()}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes that an instruction fetches ahead, on x86-64 and most ARM processors.
_CACHE_LINE = 64

# Rows of a head are further apart than the processor itself fetches ahead. 16 rows of 256 bytes, 4 KiB, are little
# beside a cache of 32 KiB; 8 and 32 rows gained as much or less on a Zen 5.
_ROWS_AHEAD = 16
"""Rows between the one that is read or written and the one that is prefetched."""


def widened(kind: str, value: Value) -> Value:
    """Return numbers of a kind as float32."""
    build, wide = value.code.builder, like(value.type, FLOAT)
    if kind == "bfloat16":
        return (Value(value.code, build.zext(value.ir, like(value.type, _INT))) << 16).bits_as(wide)
    return value if kind == "float32" else Value(value.code, build.fpext(value.ir, wide))


def nearest_bits(value: Value) -> Value:
    """Return bits whose upper half is the bfloat16 that is nearest to a float32, ties to even."""
    bits = value.bits_as(like(value.type, _INT))
    # Half a unit of the upper half, less one bit where that half is even: a tie then rounds up only from an odd number.
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    # Rounded, the low digits of a NaN could carry into the exponent or vanish, which makes an infinity; the quiet bit
    # is in the upper half.
    return value.code.choose(value != value, bits | 0x400000, rounded)


def _narrowed(kind: str, value: Value) -> Value:
    """Return numbers of float32 as another kind, rounded to the nearest, ties to even."""
    code, stored = value.code, like(value.type, STORED[kind])
    if kind != "bfloat16":
        return value if kind == "float32" else Value(code, code.builder.fptrunc(value.ir, stored))
    return (nearest_bits(value) >> 16).low_bits(_SHORT)


@routine
def copy(
    code: Code, source: Value, count: Value, factor: Value, target: Value, *, to: str, of: str = "float32"
) -> None:
    """Copy `count` numbers, times a factor, from one kind to another; one of the two is float32."""

    def some(start: Value, factor: Value, lanes: int) -> None:
        kind = STORED[of] if lanes == 1 else ir.VectorType(STORED[of], lanes)
        value = widened(of, code.load(source + BYTES[of] * start, kind, align=2)) * factor
        code.store(_narrowed(to, value), target + BYTES[to] * start, align=2)

    whole, factors = count // LANES * LANES, code.vector(factor, LANES)
    with code.loop(0, whole, LANES) as start:
        some(start, factors, LANES)
    with code.loop(whole, count) as start:
        some(start, factor, 1)


def fetch_ahead(code: Code, row: Value, line: Value, size: Value, *, to_write: bool = False) -> None:
    """Prefetch the row `_ROWS_AHEAD` rows behind one, of `size` bytes; rows begin `line` bytes apart."""
    with code.loop(0, size, _CACHE_LINE) as at:
        code.fetch(row + _ROWS_AHEAD * line + at, to_write=to_write)


@routine
def read_rows(
    code: Code,
    source: Value,
    stride: Value,
    rows: Value,
    columns: Value,
    kind: Value,
    factor: Value,
    target: Value,
    width: Value,
    size: Value,
) -> None:
    """Fill an array with `rows` rows of `columns` numbers of a kind times a factor, each row `width` long in it.

    The rest of its `size` numbers, to the right and below, becomes 0.
    """
    for name, number in words.KINDS.items():
        with code.when(kind == number), code.loop(0, rows) as r:
            row, line = source + BYTES[name] * r * stride, BYTES[name] * stride
            fetch_ahead(code, row, line, BYTES[name] * columns)
            copy(code, row, columns, factor, target + 4 * r * width, of=name, to="float32")
    with code.when(columns < width), code.loop(0, rows) as r:
        fill(code, target + 4 * (r * width + columns), width - columns, 0.0)
    fill(code, target + 4 * rows * width, size - rows * width, 0.0)


def write_row(
    code: Code, source: Value, count: Value, factor: object, target: Value, kind: Value, stride: Value | None = None
) -> None:
    """Write `count` numbers of float32 times a factor as a kind.

    Give the `stride` of the rows of `target`, in numbers, where the next ones are written next: they are prefetched.
    """
    for name, number in words.KINDS.items():
        with code.when(kind == number):
            if stride is not None:
                fetch_ahead(code, target, BYTES[name] * stride, BYTES[name] * count, to_write=True)
            copy(code, source, count, factor, target, to=name)


@routine
def fill(code: Code, target: Value, count: Value, number: Value) -> None:
    """Write a number `count` times."""
    array = Array(code, target)
    with code.loop(0, count) as i:
        array[i] = number


@routine
def add_row(code: Code, source: Value, count: Value, factor: Value, target: Value) -> None:
    """Add numbers of float32 times a factor to others; their count fills registers."""
    vector, factors = ir.VectorType(FLOAT, LANES), code.vector(factor, LANES)
    with code.loop(0, 4 * count, 4 * LANES) as at:
        code.store(
            code.times_plus(code.load(source + at, vector), factors, code.load(target + at, vector)), target + at
        )
