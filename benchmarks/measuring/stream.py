"""How fast this machine reads memory: what decoding is measured against, as it reads a cache once and does little else.

Each core goes through a part of the bytes, in order, and adds them up in registers.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir

from attn_kernels.compiler import compiling
from attn_kernels.compiler.language import FLOAT, WORD, Code, function
from attn_kernels.compiler.processor import LANES

_SUMS = 8
_STEP = 4 * LANES * _SUMS
_AHEAD = 1024
"""Distance in bytes of explicit prefetches: the processor's own prefetching stops at the end of a page."""

_PART = 2**18
"""Bytes that a core takes at a time at least."""


def reader(arrays: Sequence[np.ndarray], threads: int | None = None) -> Callable[[], None]:
    """Return a function that reads all arrays without gaps once; by default with a thread per core."""
    count = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    pool, read = ThreadPoolExecutor(count), _compiled()
    parts = []
    for array in arrays:
        part = max(_PART, array.nbytes // count) // _STEP * _STEP
        starts = range(0, array.nbytes // _STEP * _STEP, part)
        parts += [(array.ctypes.data + at, min(part, array.nbytes - at) // _STEP * _STEP) for at in starts]

    def run() -> None:
        assert arrays, "they are there as long as this is"
        for job in [pool.submit(read, *part) for part in parts]:
            job.result()

    return run


@functools.cache
def _compiled() -> Any:
    module = compiling.module("stream")
    code = Code(function(module, "stream", [WORD, WORD], WORD))
    start, count = code.arguments
    vector, zero = ir.VectorType(FLOAT, LANES), code.vector(0.0, LANES)
    sums = [code.variable(zero) for _ in range(_SUMS)]
    with code.loop(start, start + count, _STEP) as at:
        for line in range(0, _STEP, 64):
            code.fetch(at + _AHEAD + line)
        for n, total in enumerate(sums):
            total.set(total.get() + code.load(at + 4 * LANES * n, vector))
    whole = functools.reduce(lambda first, second: first + second, [total.get() for total in sums])
    answer = code.stack(LANES)
    code.store(whole, answer.address)
    code.ret(answer[0])  # else nothing would be read
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(compiling.address_of(module, "stream"))
