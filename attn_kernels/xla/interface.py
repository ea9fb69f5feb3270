"""XLA's C interface for functions that it calls, `xla/ffi/api/c_api.h`: offsets of its fields, and its requests."""

from __future__ import annotations

import re
from pathlib import Path

import jax
from llvmlite import ir

from ..compiler.language import WORD, Array, Code, Value

MAJOR, MINORS = 0, range(3, 6)
"""Versions in which all fields used here have the same offsets; compare their headers before adding another."""

_HEADER = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
_major, MINOR = (int(number) for number in re.findall(r"define XLA_FFI_API_M..OR (\d+)", _HEADER))
if _major != MAJOR or MINOR not in MINORS:
    supported = f"{MAJOR}.{MINORS[0]} to {MAJOR}.{MINORS[-1]}"
    raise ImportError(f"they know versions {supported} of XLA's interface, and this one is {_major}.{MINOR}")

# Words of XLA_FFI_CallFrame, XLA_FFI_Buffer, XLA_FFI_Api, as bytes from their start.
EXTENSION, API, CONTEXT = 8, 16, 24
ARGUMENTS, RESULTS, ATTRIBUTES = 72, 112, 160
BUFFER_DATA, BUFFER_RANK, BUFFER_SIZES, ARRAY_DATA = 24, 32, 40, 16
_MAKE_ERROR, _DESTROY_ERROR, _SCHEDULE, _COUNT_THREADS = 48, 64, 136, 144
COUNT_OF_ARGUMENTS = 56
_METADATA_OF_EXTENSION, _VERSION_OF_METADATA = 24, 24

# XLA_FFI_Error_Code_RESOURCE_EXHAUSTED of c_api.h: XLA's own code for a lack of memory.
_RESOURCE_EXHAUSTED = 8
NO_MEMORY = "attention found no memory to work in"


def word_at(address: Value) -> Value:
    """Return the word at an address."""
    return address.code.load(address, WORD)


def _text(code: Code, message: str) -> Value:
    """Return the address of a text."""
    letters = bytearray(message.encode() + b"\0")
    constant = ir.Constant(ir.ArrayType(ir.IntType(8), len(letters)), letters)
    variable = ir.GlobalVariable(code.module, constant.type, code.module.get_unique_name("text"))
    variable.linkage, variable.global_constant, variable.initializer = "internal", True, constant
    return code.address_of(variable)


class Xla:
    """XLA's functions, as available to the function that it calls."""

    def __init__(self, frame: Value):
        code = frame.code
        self._api, self._context = word_at(frame + API), word_at(frame + CONTEXT)
        self._arguments, self._answer = code.stack(5), code.stack(1)
        self._no_memory = _text(code, NO_MEMORY)

    def _ask(self, function: int, size: int, first: object, second: object = 0, third: object = 0) -> Value:
        """Call a function with a structure of up to three words; return its error, 0 for none."""
        # Structures begin with their size, as XLA_FFI_STRUCT_SIZE counts it up to the last field, and a pointer to
        # extensions.
        for index, value in enumerate((size, 0, first, second, third)):
            self._arguments[index] = value
        return self._api.code.call(word_at(self._api + function), self._arguments, returns=WORD)

    def count_threads(self) -> Value:
        """Return the number of XLA's threads, 0 if it does not report it."""
        self._answer[0] = 0
        self._forget(self._ask(_COUNT_THREADS, 32, self._context, self._answer))
        return self._answer[0]

    def schedule(self, worker: Value, job: Array) -> Value:
        """Have another thread call a function with a job; return whether that failed."""
        return self._forget(self._ask(_SCHEDULE, 40, self._context, worker, job))

    def no_memory(self) -> Value:
        """Return the error for failed allocations."""
        return self._ask(_MAKE_ERROR, 28, self._no_memory, _RESOURCE_EXHAUSTED)

    def _forget(self, error: Value) -> Value:
        failed = error != 0
        with error.code.when(failed):
            self._ask(_DESTROY_ERROR, 24, error)
        return failed


def count_sequences(buffer: Value) -> Value:
    """Return the product of all sizes of a buffer but the last three."""
    code, sizes = buffer.code, Array(buffer.code, word_at(buffer + BUFFER_SIZES), WORD)
    total = code.variable(1)
    with code.loop(0, word_at(buffer + BUFFER_RANK) - 3) as axis:
        total.set(total.get() * sizes[axis])
    return total.get()


def reply_to_metadata_query(code: Code, frame: Value) -> None:
    """Emit an early return for calls in which XLA only queries the interface version of the kernel."""
    extension = word_at(frame + EXTENSION)
    with code.when(extension != 0):
        version = word_at(extension + _METADATA_OF_EXTENSION) + _VERSION_OF_METADATA
        code.store(code.value(MAJOR + (MINOR << 32)), version)
        code.ret(0)
