"""Square tiles transposed in registers: between rows in memory and columns of scores."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ..compiler.language import FLOAT, Array, Code, Value, routine
from ..compiler.processor import LANES
from ..vectors.packing import rows_as_pairs
from .softmax import QUERIES


def transpose_registers(code: Code, rows: list[Value]) -> list[Value]:
    """Return the columns of a square, `LANES` registers of as many numbers."""
    rows, step = list(rows), 1
    while step < LANES:  # squares within squares: numbers above a diagonal are swapped with those below
        low = [place if not place & step else LANES + place - step for place in range(LANES)]
        high = [place + step if not place & step else LANES + place for place in range(LANES)]
        for r in range(LANES):
            if not r & step:
                upper, lower = rows[r], rows[r + step]
                rows[r], rows[r + step] = code.shuffle(upper, lower, low), code.shuffle(upper, lower, high)
        step *= 2
    return rows


def over_tiles(
    code: Code,
    rows: Value,
    columns: Value,
    square: Callable[[Value, Value], None],
    single: Callable[[Value, Value], None],
) -> None:
    """Emit code for each full square of `LANES` rows and columns, and for each remaining element."""
    of_rows, of_columns = (count // LANES * LANES for count in (rows, columns))
    with code.loop(0, of_rows, LANES) as r, code.loop(0, of_columns, LANES) as c:
        square(r, c)
    with code.loop(0, rows) as r, code.loop(code.choose(r < of_rows, of_columns, 0), columns) as c:
        single(r, c)


@routine
def transpose(code: Code, rows: Value, columns: Value, width: Value, out: Value) -> None:
    """Fill `out` with the first `columns` columns of `QUERIES` rows, each a row of it."""
    source, target, vector = Array(code, rows), Array(code, out), ir.VectorType(FLOAT, LANES)

    def square(c: Value, r: Value) -> None:
        lines = [code.load(source.at((r + line) * width + c), vector) for line in range(LANES)]
        for line, column in enumerate(transpose_registers(code, lines)):
            code.store(column, target.at((c + line) * QUERIES + r))

    def single(c: Value, r: Value) -> None:
        target[c * QUERIES + r] = source[r * width + c]

    over_tiles(code, columns, code.value(QUERIES), square, single)


@routine
def transpose_back(code: Code, rows: Value, count: Value, out: Value) -> None:
    """Fill `QUERIES` rows of `out`, each `count` long, with the columns of `count` rows, which fill registers."""
    source, target, vector = Array(code, rows), Array(code, out), ir.VectorType(FLOAT, LANES)
    with code.loop(0, count, LANES) as r, code.loop(0, QUERIES, LANES) as c:
        lines = [code.load(source.at((r + line) * QUERIES + c), vector) for line in range(LANES)]
        for line, column in enumerate(transpose_registers(code, lines)):
            code.store(column, target.at((c + line) * count + r))


@routine
def transpose_shorts(
    code: Code, source: Value, width: Value, rows: Value, columns: Value, out: Value, line: Value
) -> None:
    """Fill rows of `out`, `line` apart, with the columns of rows of 16-bit numbers, `width` apart.

    Rows are multiples of twice a register's numbers, columns of as many.
    """
    vector = ir.VectorType(FLOAT, LANES)
    with code.loop(0, rows, 2 * LANES) as r, code.loop(0, columns, LANES) as c:
        places = [source + 2 * ((r + 2 * n) * width + c) for n in range(LANES)]
        lines = [rows_as_pairs(code, place, width).bits_as(vector) for place in places]
        for n, column in enumerate(transpose_registers(code, lines)):
            code.store(column, out + 2 * ((c + n) * line + r))
