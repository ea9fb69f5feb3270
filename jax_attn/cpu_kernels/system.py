"""Memory, threads and functions of the process, which Numba has no words for: everything goes by its address."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiling import compiled

_BYTE, WORD = ir.IntType(8).as_pointer(), ir.IntType(64)


@intrinsic
def malloc(typing_context: Any, size: Any) -> Any:
    """Return the address of so many bytes, 0 if there are none."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_BYTE, [WORD]), "malloc")
        return builder.ptrtoint(builder.call(function, arguments), WORD)

    return types.int64(types.int64), generate


@intrinsic
def free(typing_context: Any, address: Any) -> Any:
    """Give memory from `malloc` back."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [_BYTE]), "free")
        builder.call(function, [builder.inttoptr(arguments[0], _BYTE)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def let_others_run(typing_context: Any) -> Any:
    """Offer the processor to other threads."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def fetch_and_add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to a word as one step that no other thread comes between, and return what it was."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call_function(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a function of XLA's by its address with the address of its arguments; its error, 0 for none."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(WORD, [WORD])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def as_words(typing_context: Any, address: Any) -> Any:
    """Return what `numba.carray` takes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], WORD.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def address_of(typing_context: Any, pointer: Any) -> Any:
    """Return the address that a pointer is."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], WORD)

    return types.int64(types.voidptr), generate


def address_by_name(name: str) -> Any:
    """Return what gives the address of a function that is known by name when this is loaded: not the same each time."""

    @intrinsic
    def address(typing_context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [_BYTE])
            return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, name), WORD)

        return types.int64(), generate

    return address


@compiled
def words_at(address, count):
    """Return the words from an address on as an array."""
    return carray(as_words(address), (count,), np.int64)
