"""XLA's C interface for functions that it calls, `xla/ffi/api/c_api.h`: what lies where in memory, and how to ask."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import words
from .compiling import compiled
from .memory import load_word, store_word
from .system import WORD, call_function

MAJOR, MINOR = 0, 3
_found = re.findall(r"define XLA_FFI_API_M..OR (\d+)", Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text())
if _found != [str(MAJOR), str(MINOR)]:
    raise ImportError(f"they know version {MAJOR}.{MINOR} of XLA's interface, and this one is {'.'.join(_found)}")

# Words of XLA_FFI_CallFrame, XLA_FFI_Buffer, XLA_FFI_Api, as bytes from their start.
EXTENSION, API, CONTEXT = 8, 16, 24
ARGUMENTS, RESULTS, ATTRIBUTES = 72, 112, 160
BUFFER_DATA, BUFFER_RANK, BUFFER_SIZES, ARRAY_DATA = 24, 32, 40, 16
MAKE_ERROR, DESTROY_ERROR, SCHEDULE, COUNT_THREADS = 48, 64, 136, 144
COUNT_OF_ARGUMENTS = 56
_METADATA_OF_EXTENSION, _VERSION_OF_METADATA = 24, 24

RESOURCE_EXHAUSTED = 8


@intrinsic
def no_memory(typing_context: Any) -> Any:
    """Return the address of a text."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        text = context.insert_const_string(builder.module, "attention found no memory to work in")
        return builder.ptrtoint(text, WORD)

    return types.int64(), generate


@compiled
def ask(job, api, function, size, one, two, three):
    """Call a function of XLA's with a structure of up to three words; return its error, 0 for none."""
    arguments = job[words.ARGUMENTS :]
    arguments[0], arguments[1], arguments[2], arguments[3], arguments[4] = size, 0, one, two, three
    return call_function(load_word(api + function), job.ctypes.data + 8 * words.ARGUMENTS)


@compiled
def count_threads(job, api, context):
    """Return how many threads XLA has, 0 where it does not say."""
    job[words.NEXT] = 0
    error = ask(job, api, COUNT_THREADS, 32, context, job.ctypes.data + 8 * words.NEXT, 0)
    if error != 0:
        ask(job, api, DESTROY_ERROR, 24, error, 0, 0)
    threads, job[words.NEXT] = job[words.NEXT], 0
    return threads


@compiled
def product_of_sizes(buffer, last):
    """Return the product of all sizes of a buffer but the last few."""
    total, sizes = 1, load_word(buffer + BUFFER_SIZES)
    for axis in range(load_word(buffer + BUFFER_RANK) - last):
        total *= load_word(sizes + 8 * axis)
    return total


@compiled
def answers_a_question(frame):
    """Return whether XLA only asks which version of its interface the kernel was made for, and say."""
    extension = load_word(frame + EXTENSION)
    if extension == 0:
        return False
    store_word(load_word(extension + _METADATA_OF_EXTENSION) + _VERSION_OF_METADATA, MAJOR + (MINOR << 32))
    return True
