"""The Python interface of kernels, called with addresses of arrays, and the sharing of work among threads.

A call starts threads, works too, and waits for them: nothing outlives the call that a fork could break. A framework
whose waiting threads would compete for cores lends its OpenMP threads. Working threads are counted, so that concurrent
calls together start no more than allowed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from llvmlite import ir

from .. import words
from ..compiler import compiling
from ..compiler.language import WORD, Code, function
from ..decode import forward as decode
from ..flash import backward as flash_backward
from ..flash import forward as flash_forward
from ..flash import paired
from ..flash.blocks import job_at
from ..flash.sharing import divide, take_tasks

_INT = ir.IntType(32)

_KNOWN = (
    *(words.KIND, words.CAPPED, words.SINKS, words.MASKED, words.DOCUMENTED, words.BIASED, words.D_BIASED),
    *(words.DROPPED, words.DRAWN),
)
"""Words with few different values; each combination gets specialised code."""

_AT_WORK = (ctypes.c_int64 * 1)()
"""Number of working threads."""


def run(
    kind: str, shape_words: Sequence[int], addresses: Mapping[int, int], sequences: int, threads: int, team: int = 0
) -> None:
    """Run a kernel to its end, without Python's lock.

    Args:
        kind: ``"forward"``, ``"backward"`` or, forward for few queries, ``"decode"``.
        shape_words: the words of `description.describe`.
        addresses: of arrays, by their words.
        sequences: number of sequences.
        threads: maximum number of threads, this one included.
        team: address of OpenMP's `GOMP_parallel`, whose threads are used; 0 starts separate ones.

    Raises:
        MemoryError: the workspace can't be allocated.
    """
    kernel = compiled(kind, tuple(shape_words[word] for word in _KNOWN))
    job = (ctypes.c_int64 * words.END)(*shape_words)
    for word, address in addresses.items():
        job[word] = address
    if kernel(ctypes.addressof(job), sequences, threads, ctypes.addressof(_AT_WORK), team):
        raise MemoryError("attention found no memory to work in")


def compiled(kind: str, constants: tuple[int, ...] = (0,) * len(_KNOWN)) -> Any:
    """Return a kernel for calls with these values of `_KNOWN`, by default those of float32 without options.

    Code that such calls don't need is not compiled, which halves the time.
    """
    kernel = _KERNELS[kind]
    with _COMPILING:
        return _compiled(kernel, constants, paired.instructions(kernel, constants[_KNOWN.index(words.KIND)]))


_KERNELS = {"forward": flash_forward, "backward": flash_backward, "decode": decode}


_COMPILING = threading.Lock()
"""Lock: threads that begin together would each compile."""


@functools.cache
def _compiled(kernel: Any, constants: tuple[int, ...], pairs: str | None = None) -> object:
    values = dict(zip(_KNOWN, constants, strict=True))
    module = compiling.module(kernel.NAME, values, unrolls=kernel.UNROLLS, pairs=pairs)
    worker = function(module, f"{kernel.NAME}_task", [WORD], WORD)
    worker.linkage = "internal"
    code = Code(worker)
    take_tasks(job_at(code, code.arguments[0]), kernel)
    code.ret(0)
    _write_answer(Code(function(module, kernel.NAME, [WORD] * 5, WORD)), kernel, worker)
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 6)(compiling.address_of(module, kernel.NAME))


def _write_answer(code: Code, kernel: Any, worker: ir.Function) -> None:
    """Emit the function that Python calls; it returns 1 if the workspace can't be allocated."""
    address, sequences, threads, at_work, team = code.arguments
    job = job_at(code, address)
    tasks, room, shared = divide(job, kernel, sequences, threads)
    # Threads at work in calls of other threads of Python, for which as many fewer are started.
    others = code.fetch_and_add(at_work, 1)
    helpers = code.largest(code.least(threads - others, tasks) - 1, 0)
    code.fetch_and_add(at_work, helpers)
    # In front of the workspaces, 8 bytes per thread for its pthread_t.
    memory = code.call("malloc", (room + 8) * (helpers + 1) + shared, returns=WORD)
    failed = memory == 0
    with code.when(failed):
        code.fetch_and_add(at_work, 0 - helpers - 1)
        code.ret(1)
    started = code.variable(0)
    job[words.MEMORY] = memory + 8 * (helpers + 1)
    job[words.SHARED] = memory + (room + 8) * (helpers + 1)
    with_team = (team != 0) & (helpers != 0)
    with code.loop(0, code.choose(with_team, 0, helpers)):
        name = memory + 8 * started.get()
        error = code.call("pthread_create", name, 0, code.address_of(worker), job, returns=WORD).low_bits(_INT)
        # If no more threads can be created, the existing ones do all tasks.
        started.set(started.get() + code.choose(error == 0, 1, 0))
    with code.either(with_team) as (joined, alone):
        with joined:
            code.call(team, code.address_of(worker), job, helpers + 1, 0)
        with alone:
            code.call(code.address_of(worker), job, returns=WORD)
    with code.loop(0, started.get()) as i:
        code.call("pthread_join", code.load(memory + 8 * i, WORD), 0, returns=WORD)
    kernel.finish(code, job, sequences)
    code.call("free", memory)
    code.fetch_and_add(at_work, 0 - helpers - 1)
    code.ret(0)


def _forget_others() -> None:
    """Reset the count of threads after a fork: a child has only the forking thread."""
    global _COMPILING
    _COMPILING = threading.Lock()
    _AT_WORK[0] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_others)
