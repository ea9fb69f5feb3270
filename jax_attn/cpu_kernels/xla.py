"""How XLA calls the kernels, and lends them its threads: the C interface of `xla/ffi/api/c_api.h`, word by word.

A call becomes a job (`job`): a block of words that all threads work from, each taking the next task until none is left.
The thread that XLA called on works along, and returns when all tasks are done; a thread that starts later than that
finds nothing to do, and the last to look at a job gives its memory back.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import flash_backward, flash_forward, words
from .compiling import compiled, entry
from .memory import load_word, store_word
from .softmax import QUERIES

_BYTE, _WORD = ir.IntType(8).as_pointer(), ir.IntType(64)

# Words of XLA_FFI_CallFrame, XLA_FFI_Buffer, XLA_FFI_Api, as bytes from their start.
_EXTENSION, _API, _CONTEXT = 8, 16, 24
_ARGUMENTS, _RESULTS, _ATTRIBUTES = 72, 112, 160
_BUFFER_DATA, _BUFFER_RANK, _BUFFER_SIZES, _ARRAY_DATA = 24, 32, 40, 16
_API_VERSION, _MAKE_ERROR, _DESTROY_ERROR, _SCHEDULE, _COUNT_THREADS = 32, 48, 64, 136, 144
_COUNT_OF_ARGUMENTS = 56
_METADATA_OF_EXTENSION, _VERSION_OF_METADATA = 24, 24


_RESOURCE_EXHAUSTED = 8

_TASKS_PER_THREAD = 4
"""Tasks that a thread should find at least, as they are not all of one length."""


@intrinsic
def _malloc(typing_context: Any, size: Any) -> Any:
    """Return the address of so many bytes, 0 if there are none."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_BYTE, [_WORD]), "malloc")
        return builder.ptrtoint(builder.call(function, arguments), _WORD)

    return types.int64(types.int64), generate


@intrinsic
def _free(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [_BYTE]), "free")
        builder.call(function, [builder.inttoptr(arguments[0], _BYTE)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _let_others_run(typing_context: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _fetch_and_add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to a word as one step that no other thread comes between, and return what it was."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a function of XLA's by its address with the address of its arguments; its error, 0 for none."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _as_words(typing_context: Any, address: Any) -> Any:
    """Return what `numba.carray` takes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _WORD.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def _number(typing_context: Any, pointer: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], _WORD)

    return types.int64(types.voidptr), generate


def _symbol(name: str) -> Any:
    """Return what gives the address of a function that is known by name when this is loaded: not the same each time."""

    @intrinsic
    def address(typing_context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [_BYTE])
            return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, name), _WORD)

        return types.int64(), generate

    return address


@intrinsic
def _no_memory(typing_context: Any) -> Any:
    """Return the address of a text."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        text = context.insert_const_string(builder.module, "attention found no memory to work in")
        return builder.ptrtoint(text, _WORD)

    return types.int64(), generate


@compiled
def _words(address, count):  # type: ignore[no-untyped-def]
    return carray(_as_words(address), (count,), np.int64)


@compiled
def _ask(job, api, function, size, one, two, three):  # type: ignore[no-untyped-def]
    """Call a function of XLA's with a structure of up to three words; return its error, 0 for none."""
    arguments = job[words.ARGUMENTS :]
    arguments[0], arguments[1], arguments[2], arguments[3], arguments[4] = size, 0, one, two, three
    return _call(load_word(api + function), job.ctypes.data + 8 * words.ARGUMENTS)


@compiled
def _count_threads(job, api, context):  # type: ignore[no-untyped-def]
    """Return how many threads XLA has, 0 where it does not say."""
    job[words.NEXT] = 0
    error = _ask(job, api, _COUNT_THREADS, 32, context, job.ctypes.data + 8 * words.NEXT, 0)
    if error != 0:
        _ask(job, api, _DESTROY_ERROR, 24, error, 0, 0)
    threads, job[words.NEXT] = job[words.NEXT], 0
    return threads


@compiled
def _product_of_sizes(buffer, last):  # type: ignore[no-untyped-def]
    """Return the product of all sizes of a buffer but the last few."""
    total, sizes = 1, load_word(buffer + _BUFFER_SIZES)
    for axis in range(load_word(buffer + _BUFFER_RANK) - last):
        total *= load_word(sizes + 8 * axis)
    return total


@compiled
def _begin(frame, arrays, address):  # type: ignore[no-untyped-def]
    """Fill in the job of a call: its shape, and where its arrays are."""
    job = _words(address, words.END)
    job[:] = 0
    shape = load_word(load_word(load_word(frame + _ATTRIBUTES)) + _ARRAY_DATA)
    for word in range(words.SHAPE_END):
        job[word] = load_word(shape + 8 * word)
    arguments, results = load_word(frame + _ARGUMENTS), load_word(frame + _RESULTS)
    given = load_word(frame + _COUNT_OF_ARGUMENTS)
    if job[words.SINKS]:  # the last of the arguments
        given -= 1
        job[words.SINK] = load_word(load_word(arguments + 8 * given) + _BUFFER_DATA)
    for place, word in enumerate(arrays):
        buffer = load_word(arguments + 8 * place) if place < given else load_word(results + 8 * (place - given))
        job[word] = load_word(buffer + _BUFFER_DATA)
    return job, _product_of_sizes(load_word(arguments), 3)


@compiled
def _release(job):  # type: ignore[no-untyped-def]
    if _fetch_and_add(job.ctypes.data + 8 * words.HOLDERS, -1) == 1:
        _free(job.ctypes.data)


@compiled
def _answers_a_question(frame):  # type: ignore[no-untyped-def]
    """Return whether XLA only asks which version of its interface the kernel was made for, and say: its own."""
    extension = load_word(frame + _EXTENSION)
    if extension == 0:
        return False
    version = load_word(load_word(frame + _API) + _API_VERSION)
    store_word(load_word(extension + _METADATA_OF_EXTENSION) + _VERSION_OF_METADATA, version)
    return True


def _answer(kernel: Any, arrays: tuple[int, ...], task_name: str) -> Any:
    """Return what a thread does that XLA calls on.

    Args:
        kernel: a module with the function ``room`` of a job, the bytes that a thread works in.
        arrays: the words of a job for the arguments and then the results of a call.
        task_name: how the function is known that works on a job.
    """
    room, per_head = kernel.room, kernel.PER_HEAD
    address_of_task = _symbol(task_name)

    @compiled
    def answer(data):  # type: ignore[no-untyped-def]
        frame = _number(data)
        if _answers_a_question(frame):
            return 0
        api, context = load_word(frame + _API), load_word(frame + _CONTEXT)
        address = _malloc(8 * words.END)
        job, sequences = _begin(frame, arrays, address)
        threads = max(1, _count_threads(job, api, context))
        heads = sequences * (job[words.HEADS] if per_head else job[words.KEY_HEADS])
        job[words.PARTS] = 1
        if per_head:
            blocks = (job[words.QUERIES] + QUERIES - 1) // QUERIES
            job[words.PARTS] = min(blocks, max(1, -(-_TASKS_PER_THREAD * threads // heads)))
        job[words.TASKS] = heads * job[words.PARTS]
        job[words.ROOM] = room(job)
        helpers = min(threads, job[words.TASKS]) - 1
        job[words.MEMORY] = _malloc(job[words.ROOM] * (1 + helpers))
        if job[words.MEMORY] == 0:
            error = _ask(job, api, _MAKE_ERROR, 28, _no_memory(), _RESOURCE_EXHAUSTED, 0)
            _free(address)
            return error
        # One more than will look at it: this thread, which still waits for the others when it has worked on it.
        job[words.HOLDERS] = 2 + helpers
        for _ in range(helpers):
            error = _ask(job, api, _SCHEDULE, 40, context, address_of_task(), address)
            if error != 0:  # no thread is to be had: this one does it all
                _ask(job, api, _DESTROY_ERROR, 24, error, 0, 0)
                _fetch_and_add(address + 8 * words.HOLDERS, -1)
        _call(address_of_task(), address)
        while _fetch_and_add(address + 8 * words.DONE, 0) < job[words.TASKS]:
            _let_others_run()
        _free(job[words.MEMORY])
        _release(job)
        return 0

    return answer


_answer_forward = _answer(
    flash_forward,
    (words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL),
    "attn_bridge_flash_forward_task",
)
_answer_backward = _answer(
    flash_backward,
    (
        *(words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL, words.D_CONTEXT, words.D_TOTAL),
        *(words.D_QUERY, words.D_KEY, words.D_VALUE, words.SLOPE),
    ),
    "attn_bridge_flash_backward_task",
)


@compiled
def _take(job):  # type: ignore[no-untyped-def]
    """Return a task that nobody took, -1 if there is none."""
    task = _fetch_and_add(job.ctypes.data + 8 * words.NEXT, 1)
    return task if task < job[words.TASKS] else -1


@compiled
def _memory_of_worker(job):  # type: ignore[no-untyped-def]
    return job[words.MEMORY] + job[words.ROOM] * _fetch_and_add(job.ctypes.data + 8 * words.WORKERS, 1)


def _sources() -> str:
    """Return a digest of this folder, as Numba looks at the file of an entry alone when it asks whether it changed."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def forward() -> Any:
    """Return the function that XLA calls for attention forward, compiled or read from disk."""
    stamp = _sources()

    @entry(types.int64(types.voidptr))
    def flash_forward_task(data):  # type: ignore[no-untyped-def]
        stamp  # noqa: B018 -- what is kept on disk is kept under it
        job = _words(_number(data), words.END)
        memory, task = _memory_of_worker(job), _take(job)
        while task >= 0:
            flash_forward.run(job, task, memory)
            _fetch_and_add(job.ctypes.data + 8 * words.DONE, 1)
            task = _take(job)
        _release(job)
        return 0

    llvm.add_symbol("attn_bridge_flash_forward_task", flash_forward_task.address)

    @entry(types.int64(types.voidptr))
    def flash_forward_call(data):  # type: ignore[no-untyped-def]
        stamp  # noqa: B018
        return _answer_forward(data)

    return _kept_alive(flash_forward_task, flash_forward_call)


@functools.cache
def backward() -> Any:
    """Return the function that XLA calls for the gradients of attention."""
    stamp = _sources()

    @entry(types.int64(types.voidptr))
    def flash_backward_task(data):  # type: ignore[no-untyped-def]
        stamp  # noqa: B018
        job = _words(_number(data), words.END)
        memory, task = _memory_of_worker(job), _take(job)
        while task >= 0:
            flash_backward.run(job, task, memory)
            _fetch_and_add(job.ctypes.data + 8 * words.DONE, 1)
            task = _take(job)
        _release(job)
        return 0

    llvm.add_symbol("attn_bridge_flash_backward_task", flash_backward_task.address)

    @entry(types.int64(types.voidptr))
    def flash_backward_call(data):  # type: ignore[no-untyped-def]
        stamp  # noqa: B018
        return _answer_backward(data)

    return _kept_alive(flash_backward_task, flash_backward_call)


def _kept_alive(task: Any, call: Any) -> Any:
    _ALIVE.extend((task, call))
    return call.ctypes


_ALIVE: list[Any] = []
"""Compiled functions: XLA may call them until the process ends."""
