"""Matrix products of bfloat16 whose sums are float32, by the instructions that processors have for them.

Two numbers of the left side that are neighbours along the depth are multiplied at once, with two of the right side that
lie in one word of 32 bits, a pair: ``right[k, c]`` is the low half of the word ``[k // 2, c]`` and ``right[k + 1, c]``
the high one. AMX takes just that (``tdpbf16ps``), sixteen rows and columns at a time, and so does AVX-512
(``vdpbf16ps``), a row at a time. Numbers below the least of full precision are 0 to both.

Sizes are multiples of `EDGE` with AMX, else of 16, so that tiles are whole: who calls fills its memory up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

from ..compiler.language import FLOAT, NOTHING, Code, Value, routine
from ..compiler.processor import LANES

EDGE = 32
"""Two tiles of AMX: rows, columns and depth of a product that it computes are multiples of this."""

CHANNELS = {"amx": EDGE, "avx512bf16": 16, "any": EDGE, "any16": 16}
"""Multiples that the channels are filled up to; those of queries and keys are always `EDGE`."""

_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)

_TILE = 16
"""Rows of a tile, and the words of 32 bits in each."""

# The tile registers of AMX, tmm0 to tmm7; the configuration has room for 16.
_TILES = 8

# The upper bfloat16 of a pair, whose word read as float32 is that number.
_UPPER = -(2**16)


def up_to_edge(count: Value, edge: int = EDGE) -> Value:
    """Return the next multiple of an edge."""
    return (count + (edge - 1)) // edge * edge


@contextmanager
def ready(code: Code) -> Iterator[None]:
    """Emit the processor's set-up before products and its tear-down after them, once for many products."""
    is_amx = code.module.pairs == "amx"
    if is_amx:
        code.instruct("llvm.x86.ldtilecfg", NOTHING, code.pointer(_configuration(code)))
    yield
    if is_amx:
        code.instruct("llvm.x86.tilerelease", NOTHING)


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
    columns: Value,
    depth: Value,
    *,
    adds: bool,
) -> None:
    """Compute ``out[r, c] = sum_k left[r, k] * right[k, c]``, or add it to the contents of `out`.

    Rows of `left` are `stride` numbers apart, those of pairs `width` words, and those of `out` `line` numbers of
    float32. Inside `ready` only.
    """
    sizes = (left, stride, right, width, out, line, rows, columns, depth)
    if code.module.pairs == "amx":
        _by_tiles(code, *sizes, adds=adds)
    elif code.module.pairs == "avx512bf16":
        # 4 * 4 and 8 * 2 are 16 sums of 32 registers; the columns left over are a multiple of 16, which
        # 8 * 1 ends.
        _by_rows(code, *sizes, adds=adds, lanes=16, tiles=((4, 4), (8, 2), (8, 1)), multiply=_with_avx512)
    else:
        _by_rows(code, *sizes, adds=adds, lanes=LANES, tiles=((4, 2), (4, 1)), multiply=_with_floats)


# ---- AMX


def _configuration(code: Code) -> Value:
    """Return the address of the configuration in which all tiles are whole."""
    variable = code.module.globals.get("tiles")
    if variable is None:
        # Operand of LDTILECFG, 64 bytes: palette 1, then from byte 16 on the bytes of a row of each tile (16 bits
        # each), and from byte 48 on the rows of each; the palette has 8 tiles, the operand room for 16.
        unused = 16 - _TILES
        sizes = bytes([1] + [0] * 15) + (bytes([4 * _TILE, 0]) * _TILES + bytes(2 * unused))
        sizes += bytes([_TILE]) * _TILES + bytes(unused)
        variable = ir.GlobalVariable(code.module, ir.ArrayType(_BYTE, len(sizes)), "tiles")
        variable.linkage, variable.global_constant, variable.align = "internal", True, 64
        variable.initializer = ir.Constant(variable.value_type, bytearray(sizes))
    return code.address_of(variable)


def _by_tiles(
    code: Code,
    left: Value,
    stride: Value,
    right: Value,
    width: Value,
    out: Value,
    line: Value,
    rows: Value,
    columns: Value,
    depth: Value,
    *,
    adds: bool,
) -> None:
    """Compute a product in four tiles at once, of two tiles of each side."""
    # All 8 tiles: 2 * 2 products per step need 2 + 2 loads; with a single sum, every product would need 2.
    sums, of_left, of_right = range(4), (4, 5), (6, 7)

    def with_tile(what: str, tile: int, *operands: ir.Value) -> None:
        code.instruct(f"llvm.x86.{what}", NOTHING, ir.Constant(_BYTE, tile), *operands)

    def load(tile: int, address: Value, between: Value) -> None:
        with_tile("tileloadd64", tile, code.pointer(address), between.ir)

    with code.loop(0, columns, EDGE) as c, code.loop(0, rows, EDGE) as r:
        places = [out + 4 * ((r + _TILE * (tile // 2)) * line + c + _TILE * (tile % 2)) for tile in sums]
        for tile, target in zip(sums, places, strict=True):
            if adds:
                load(tile, target, 4 * line)
            else:
                with_tile("tilezero", tile)
        with code.loop(0, depth, EDGE) as k:
            for n, tile in enumerate(of_left):
                load(tile, left + 2 * ((r + _TILE * n) * stride + k), 2 * stride)
            for n, tile in enumerate(of_right):
                load(tile, right + 4 * (k // 2 * width + c + _TILE * n), 4 * width)
            for tile in sums:
                sides = (of_left[tile // 2], of_right[tile % 2])
                with_tile("tdpbf16ps", tile, *(ir.Constant(_BYTE, side) for side in sides))
        for tile, target in zip(sums, places, strict=True):
            with_tile("tilestored64", tile, code.pointer(target), (4 * line).ir)


# ---- registers

_Multiply = Callable[[Value, list[Value], list[Value]], list[Value]]
"""Adds to sums the products of a pair of the left side, in every lane, and some pairs of the right."""


def _by_rows(
    code: Code,
    left: Value,
    stride: Value,
    right: Value,
    width: Value,
    out: Value,
    line: Value,
    rows: Value,
    columns: Value,
    depth: Value,
    *,
    adds: bool,
    lanes: int,
    tiles: tuple[tuple[int, int], ...],
    multiply: _Multiply,
) -> None:
    """Compute a product in registers, in tiles of (rows, registers), the widest that fits first."""
    kind, of_pairs = ir.VectorType(FLOAT, lanes), ir.VectorType(_INT, lanes)
    zero, done = code.vector(0.0, lanes), code.value(0)
    for together, vectors in tiles:
        end = done + (columns - done) // (vectors * lanes) * (vectors * lanes)
        with code.loop(done, end, vectors * lanes) as c, code.loop(0, rows, together) as r:
            places = [[out + 4 * ((r + i) * line + c + lanes * v) for v in range(vectors)] for i in range(together)]
            sums = [[code.variable(code.load(place, kind) if adds else zero) for place in of_row] for of_row in places]
            starts = [left + 2 * (r + i) * stride for i in range(together)]
            at = code.variable(right + 4 * c)
            with code.loop(0, 2 * depth, 4) as k:
                of_right = [code.load(at.get() + 4 * lanes * v, of_pairs) for v in range(vectors)]
                for start, totals in zip(starts, sums, strict=True):
                    pair = code.vector(code.load(start + k, _INT, align=2), lanes)
                    products = multiply(pair, of_right, [total.get() for total in totals])
                    for total, number in zip(totals, products, strict=True):
                        total.set(number)
                at.set(at.get() + 4 * width)
            for of_row, totals in zip(places, sums, strict=True):
                for target, total in zip(of_row, totals, strict=True):
                    code.store(total.get(), target)
        done = end


def _with_avx512(pair: Value, of_right: list[Value], sums: list[Value]) -> list[Value]:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return [pair.code.instruct(name, s.type, s.ir, pair.ir, one.ir) for one, s in zip(of_right, sums, strict=True)]


def _with_floats(pair: Value, of_right: list[Value], sums: list[Value]) -> list[Value]:
    code, results = pair.code, []
    for pairs_of_right, total in zip(of_right, sums, strict=True):
        # A bfloat16 is the upper half of a float32: shifted up, or with the lower half masked, it is that number.
        left_low, right_low = ((words << 16).bits_as(total.type) for words in (pair, pairs_of_right))
        left_high, right_high = ((words & _UPPER).bits_as(total.type) for words in (pair, pairs_of_right))
        results.append(code.times_plus(left_high, right_high, code.times_plus(left_low, right_low, total)))
    return results
