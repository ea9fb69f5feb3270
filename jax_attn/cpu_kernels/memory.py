"""Numbers read and written by address, as XLA hands memory over: float32, bfloat16 and float16, computed as float32.

Addresses count bytes, sizes and strides numbers. The kinds are `words.KINDS`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiling import compiled, stay_apart
from .processor import LANES


def _loader(stored: ir.Type, taken: Any) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], stored.as_pointer()))

        return taken(types.int64), generate

    return load


def _storer(stored: ir.Type, taken: Any) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], builder.inttoptr(arguments[0], stored.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, taken), generate

    return store


load_word, store_word = _loader(ir.IntType(64), types.int64), _storer(ir.IntType(64), types.int64)
load_float, store_float = _loader(ir.FloatType(), types.float32), _storer(ir.FloatType(), types.float32)


@intrinsic
def as_double(typing_context: Any, bits: Any) -> Any:
    """Return the float64 of so many bits."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_STORED = {"float32": _FLOAT, "bfloat16": ir.IntType(16), "float16": ir.HalfType()}


def spread(builder: ir.IRBuilder, number: ir.Value, lanes: int = LANES) -> ir.Value:
    """Return a vector of so many times a number."""
    first = builder.insert_element(ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, lanes), None))


def _mover(source_kind: str, target_kind: str, lanes: int) -> Any:
    """Return what copies so many numbers, times a factor, from one kind to another; one of the two is float32.

    They are rounded to the nearest, ties to even.
    """
    stored, moved, wide, words = (
        ir.VectorType(one, lanes) for one in (_STORED[source_kind], _STORED[target_kind], _FLOAT, _INT)
    )

    def widen(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        if source_kind == "bfloat16":
            return builder.bitcast(builder.shl(builder.zext(value, words), words([16] * lanes)), wide)
        return value if source_kind == "float32" else builder.fpext(value, wide)

    def narrow(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        if target_kind != "bfloat16":
            return value if target_kind == "float32" else builder.fptrunc(value, moved)
        sixteen, one, half, quiet_bit = (words([number] * lanes) for number in (16, 1, 0x7FFF, 0x400000))
        bits = builder.bitcast(value, words)
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        rounded = builder.add(builder.add(bits, half), odd)
        is_nan = builder.fcmp_unordered("uno", value, value)
        rounded = builder.select(is_nan, builder.or_(bits, quiet_bit), rounded)
        return builder.trunc(builder.lshr(rounded, sixteen), moved)

    @intrinsic
    def move(typing_context: Any, source: Any, factor: Any, target: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            source, factor, target = arguments
            value = widen(builder, builder.load(builder.inttoptr(source, stored.as_pointer()), align=2))
            value = narrow(builder, builder.fmul(value, spread(builder, factor, lanes)))
            builder.store(value, builder.inttoptr(target, moved.as_pointer()), align=2)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64), generate

    return move


_move_floats, _move_float = (_mover("float32", "float32", lanes) for lanes in (LANES, 1))
_read_bfloats, _read_bfloat = (_mover("bfloat16", "float32", lanes) for lanes in (LANES, 1))
_read_halves, _read_half = (_mover("float16", "float32", lanes) for lanes in (LANES, 1))
_write_bfloats, _write_bfloat = (_mover("float32", "bfloat16", lanes) for lanes in (LANES, 1))
_write_halves, _write_half = (_mover("float32", "float16", lanes) for lanes in (LANES, 1))


@intrinsic
def as_pointer(typing_context: Any, address: Any) -> Any:
    """Return what `numba.carray` takes: a pointer to float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@compiled
def read_rows(source, stride, rows, columns, kind, factor, target, width):
    """Fill an array with `rows` rows of `columns` numbers of a kind times a factor, each row `width` long in it.

    What the target holds beyond them, to the right and below, becomes 0.
    """
    stay_apart()
    whole = columns // LANES * LANES
    for r in range(rows):
        out = target.ctypes.data + 4 * r * width
        if kind == 0:
            at = source + 4 * r * stride
            for c in range(0, whole, LANES):
                _move_floats(at + 4 * c, factor, out + 4 * c)
            for c in range(whole, columns):
                _move_float(at + 4 * c, factor, out + 4 * c)
        elif kind == 1:
            at = source + 2 * r * stride
            for c in range(0, whole, LANES):
                _read_bfloats(at + 2 * c, factor, out + 4 * c)
            for c in range(whole, columns):
                _read_bfloat(at + 2 * c, factor, out + 4 * c)
        else:
            at = source + 2 * r * stride
            for c in range(0, whole, LANES):
                _read_halves(at + 2 * c, factor, out + 4 * c)
            for c in range(whole, columns):
                _read_half(at + 2 * c, factor, out + 4 * c)
        for c in range(columns, width):
            target[r * width + c] = 0.0
    for c in range(rows * width, len(target)):
        target[c] = 0.0


@compiled
def write_row(rows, start, columns, kind, factor, target):
    """Write `columns` numbers of an array, from `start` on, times a factor as a kind."""
    stay_apart()
    whole = columns // LANES * LANES
    row = rows.ctypes.data + 4 * start
    if kind == 0:
        for c in range(0, whole, LANES):
            _move_floats(row + 4 * c, factor, target + 4 * c)
        for c in range(whole, columns):
            _move_float(row + 4 * c, factor, target + 4 * c)
    elif kind == 1:
        for c in range(0, whole, LANES):
            _write_bfloats(row + 4 * c, factor, target + 2 * c)
        for c in range(whole, columns):
            _write_bfloat(row + 4 * c, factor, target + 2 * c)
    else:
        for c in range(0, whole, LANES):
            _write_halves(row + 4 * c, factor, target + 2 * c)
        for c in range(whole, columns):
            _write_half(row + 4 * c, factor, target + 2 * c)
