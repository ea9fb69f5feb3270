"""The XLA interface of kernels, and the sharing of work among its threads.

A call becomes a job: a block of words that all threads work from, each taking the next task until none is left. The
calling thread works too, and returns when all tasks are done; a thread that starts later than that finds no task, and
the last thread to release a job frees its memory.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from llvmlite import ir

from .. import words
from ..compiler import compiling
from ..compiler.language import WORD, Array, Code, Value, function
from ..decode import forward as flash_decode
from ..flash import backward as flash_backward
from ..flash import forward as flash_forward
from ..flash import paired
from ..flash.blocks import job_at
from ..flash.sharing import divide, take_tasks
from ..linear import few_rows as few_rows_kernel
from .interface import (
    ARGUMENTS,
    ARRAY_DATA,
    ATTRIBUTES,
    BUFFER_DATA,
    COUNT_OF_ARGUMENTS,
    RESULTS,
    Xla,
    count_sequences,
    reply_to_metadata_query,
    word_at,
)


def forward(dtype: str | None = None) -> Any:
    """Return the function that XLA calls for attention forward, compiled for arrays of one dtype or of all."""
    return _of_dtype(flash_forward, dtype)


def backward(dtype: str | None = None) -> object:
    """Return the function that XLA calls for the gradients of attention, compiled for arrays of one dtype or of all."""
    return _of_dtype(flash_backward, dtype)


def instructions(dtype: str) -> str | None:
    """Return the instructions by which kernels multiply arrays of a dtype in pairs, None for a dtype without them."""
    return paired.instructions(flash_forward, words.KINDS[dtype])


def decode(dtype: str) -> Any:
    """Return the function that XLA calls for attention of few queries forward, compiled for arrays of a dtype."""
    return _of_dtype(flash_decode, dtype)


def few_rows(dtype: str) -> object:
    """Return the function that XLA calls for the product of a few rows and a matrix, compiled for a dtype."""
    return _of_dtype(few_rows_kernel, dtype)


_COMPILING = threading.Lock()
"""Threads that begin together would each compile."""


def _of_dtype(kernel: object, dtype: str | None) -> object:
    kind = None if dtype is None else words.KINDS[dtype]
    with _COMPILING:
        return _compiled(kernel, kind, paired.instructions(kernel, kind))


@functools.cache
def _compiled(kernel: Any, kind: int | None, pairs: str | None) -> object:
    constants = None if kind is None else {words.KIND: kind}
    module = compiling.module(kernel.NAME, constants, unrolls=kernel.UNROLLS, pairs=pairs)
    worker = function(module, f"{kernel.NAME}_task", [WORD], WORD)
    worker.linkage = "internal"
    _write_worker(Code(worker), kernel)
    _write_answer(Code(function(module, kernel.NAME, [WORD], WORD)), kernel, worker)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(compiling.address_of(module, kernel.NAME))


def _write_worker(code: Code, kernel: object) -> None:
    """Emit the function of a worker thread: it takes tasks of a kernel until none is left."""
    job = job_at(code, code.arguments[0])
    take_tasks(job, kernel)
    _release(job)
    code.ret(0)


def _write_answer(code: Code, kernel: Any, worker: ir.Function) -> None:
    """Emit the function that XLA calls."""
    frame = code.arguments[0]
    reply_to_metadata_query(code, frame)
    xla = Xla(frame)
    job = job_at(code, code.call("malloc", 8 * words.END, returns=WORD))
    with code.when(job.address == 0):
        code.ret(xla.no_memory())
    sequences = _begin(frame, job, kernel.ARRAYS)
    threads = code.largest(xla.count_threads(), 1)
    tasks, room, shared = divide(job, kernel, sequences, threads)
    helpers = code.largest(code.least(threads, tasks) - 1, 0)
    memory = code.call("malloc", room * (helpers + 1) + shared, returns=WORD)
    with code.when(memory == 0):
        code.call("free", job)
        code.ret(xla.no_memory())
    job[words.MEMORY], job[words.SHARED] = memory, memory + room * (helpers + 1)
    # One more than will look at it: this thread, which still waits for the others when it has worked on it.
    job[words.HOLDERS] = helpers + 2
    with code.loop(0, helpers), code.when(xla.schedule(code.address_of(worker), job)):
        # No thread is to be had: this one does it all.
        code.fetch_and_add(job.at(words.HOLDERS), -1)
    code.call(code.address_of(worker), job, returns=WORD)
    # Every task is taken by now: what is left to wait for is at most one task of each other thread.
    with code.repeat() as leave_if:
        leave_if(code.fetch_and_add(job.at(words.DONE), 0) >= tasks)
        code.call("sched_yield")
    kernel.finish(code, job, sequences)
    code.call("free", memory)
    _release(job)
    code.ret(0)


def _begin(frame: Value, job: Array, arrays: tuple[int, ...]) -> Value:
    """Fill in the job of a call, its shape and the addresses of its arrays, and return the number of sequences."""
    code = frame.code
    with code.loop(0, words.END) as i:
        job[i] = 0
    shape = Array(code, word_at(word_at(word_at(frame + ATTRIBUTES)) + ARRAY_DATA), WORD)
    with code.loop(0, words.SHAPE_END) as i:
        job[i] = shape[i]
    job[words.BOUNDS] = code.choose(job[words.BOUNDED] != 0, shape.at(words.SHAPE_END), 0)
    arguments, results = (Array(code, word_at(frame + place), WORD) for place in (ARGUMENTS, RESULTS))
    n_arguments = word_at(frame + COUNT_OF_ARGUMENTS)
    for flag, word in reversed(words.OPTIONAL.values()):
        n_arguments = n_arguments - job[flag]
        with code.when(job[flag] != 0):
            job[word] = word_at(arguments[n_arguments] + BUFFER_DATA)
    for index, word in enumerate(arrays):
        at = code.choose(n_arguments > index, arguments.at(index), results.at(0) + (index - n_arguments) * 8)
        job[word] = word_at(word_at(at) + BUFFER_DATA)
    with code.when(job[words.D_BIASED] != 0):
        job[words.D_BIAS] = word_at(results[len(arrays) - n_arguments] + BUFFER_DATA)
    return count_sequences(arguments[0])


def _release(job: Array) -> None:
    code = job.code
    with code.when(code.fetch_and_add(job.at(words.HOLDERS), -1) == 1):
        code.call("free", job)
