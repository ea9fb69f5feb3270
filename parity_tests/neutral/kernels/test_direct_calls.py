"""Kernels called with addresses: they touch no other memory, give it back, and bear threads and forks."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import masks
from attn_kernels import words
from attn_kernels.description import describe, intervals
from parity_tests.support.processes.forks import in_a_process

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the extra cpu is not installed", allow_module_level=True)

from attn_kernels.compiler import processor
from attn_kernels.direct import calls

PAGE = mmap.PAGESIZE


def guarded(shape: tuple[int, ...], dtype: Any, *, at_end: bool) -> np.ndarray:
    """Return an array between two pages that nobody may touch, next to the one after it or the one before it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (start, start + (pages + 1) * PAGE):
        assert libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
    place = PAGE + (pages * PAGE - size if at_end else 0)
    return np.frombuffer(memory, dtype, int(np.prod(shape)), place).reshape(shape)


def call(
    seed: int = 0, *, plain: bool = False, batch: int = 2, make: Any = None, dtype: str = "float32", queries: int = 77
) -> Any:
    """Return what runs a forward and a backward call of odd sizes, and the arrays it fills.

    Of few queries it runs the kernel for those, to keys and values of which more than are used have room.
    """
    make = make or (lambda shape, dtype: np.zeros(shape, dtype))
    random = np.random.default_rng(seed)
    heads, key_heads, keys, width, value_width = 4, 2, 101, 19, 13
    kinds = ("forward", "backward")
    if queries <= words.FEW:
        kinds, keys, value_width = ("decode",), 613, 16
    stored = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]

    def filled(values: Any, dtype: Any) -> np.ndarray:
        array = make(values.shape, dtype)
        array[...] = values
        return array

    query, key, value, d_context = (
        filled(random.normal(size=shape), stored)
        for shape in (
            (batch, queries, heads, width),
            (batch, keys, key_heads, width),
            (batch, keys, key_heads, value_width),
            (batch, queries, heads, value_width),
        )
    )
    strides = None
    if kinds == ("decode",):  # as torch's cache has them: the slots of a head follow one another
        held = [filled(one.transpose(0, 2, 1, 3), stored).transpose(0, 2, 1, 3) for one in (key, value)]
        key, value = (one[:, 5:] for one in held)
        keys -= 5
        strides = tuple(tuple(size // one.itemsize for size in one.strides[:3]) for one in (key, value))
    others, given = {}, {}
    if not plain:
        ids = np.sort(random.integers(0, 2, (batch, keys)), 1)
        others = {
            "bias": filled(random.normal(size=(1, heads, queries, keys)), np.float32),
            "sinks": filled(random.normal(size=(batch, heads)), np.float32),
            "mask": filled(random.random((batch, 1, queries, keys)) < 0.8, np.bool_),
            "query_ids": filled(ids[:, None, :queries, None], np.int32),
            "key_ids": filled(ids[:, None, None, :], np.int32),
            "seed": filled(random.integers(0, 2**31, (1, 2)), np.int32),
        }
        given = {"softcap": 3.0, "dropout": 0.2}
    if "seed" in others and "decode" in kinds:
        del others["seed"], given["dropout"]
    bounds = filled(intervals(masks.causal().offset(keys - 71), queries), np.int64)
    results = {
        words.CONTEXT: make(d_context.shape, stored),
        **{word: make((batch, heads, queries), np.float32) for word in (words.TOP, words.TOTAL, words.SLOPE)},
        words.D_QUERY: make(query.shape, stored),
        words.D_KEY: make(key.shape, stored),
        words.D_VALUE: make(value.shape, stored),
        words.D_BIAS: make((1, heads, queries, keys), np.float32),
    }
    arrays = {
        **dict(
            zip((words.QUERY, words.KEY, words.VALUE, words.D_CONTEXT), (query, key, value, d_context), strict=True)
        ),
        **{words.OPTIONAL[name][1]: one for name, one in others.items()},
        words.BOUNDS: bounds,
        words.D_TOTAL: filled(random.normal(size=(batch, heads, queries)), np.float32),
        **results,
    }
    told = {
        kind: describe(
            dtype,
            query.shape,
            key.shape,
            value.shape,
            {name: one.shape for name, one in others.items()},
            **{"scale": 0.3, "softcap": None, "dropout": 0.0, **given},
            batch=batch,
            bounded=True,
            differentiates_bias=kind == "backward" and not plain,
            strides=strides,
        )
        for kind in kinds
    }
    addresses = {word: one.ctypes.data for word, one in arrays.items()}

    def run(threads: int) -> list[np.ndarray]:
        assert arrays, "they are there as long as this is"
        assert key.base is not None or not strides
        for kind, words_of_kind in told.items():
            calls.run(kind, words_of_kind, addresses, batch, threads)
        return [one.copy() for one in results.values()]

    return run


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
@pytest.mark.parametrize("queries", [77, 3, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "all options"])
def test_kernels_touch_no_memory_outside_the_arrays(plain, dtype, queries, monkeypatch):
    """Of bfloat16 by products of pairs, whatever the processor has for them."""
    monkeypatch.setattr(processor, "pairs", lambda: "any")
    options = {"plain": plain, "dtype": dtype, "queries": queries}
    want = call(**options)(3)  # compiles, which a fork then need not

    def compares(at_end: bool) -> None:
        results = call(**options, make=functools.partial(guarded, at_end=at_end))(3)
        for result, wanted in zip(results, want, strict=True):
            np.testing.assert_array_equal(result.astype("float32"), wanted.astype("float32"))

    ends = {at_end: in_a_process(functools.partial(compares, at_end)) for at_end in (True, False)}
    assert ends == {True: 0, False: 0}, "at the end, at the beginning: the status, or minus the signal"


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("queries", [77, 3, 1])
def test_any_number_of_threads_computes_the_same(threads, queries):
    want, found = call(queries=queries)(1), call(queries=queries)(threads)
    assert np.abs(want[0]).max() > 0
    for got, wanted in zip(found, want, strict=True):
        assert np.abs(wanted).max() > 0 or queries != 77
        np.testing.assert_array_equal(got, wanted)


def test_any_number_of_threads_computes_the_same_in_pairs(monkeypatch):
    monkeypatch.setattr(processor, "pairs", lambda: "any")
    want, found = (call(dtype="bfloat16")(threads) for threads in (1, 7))
    for got, wanted in zip(found, want, strict=True):
        assert np.abs(wanted.astype("float32")).max() > 0
        np.testing.assert_array_equal(got.astype("float32"), wanted.astype("float32"))


@pytest.mark.parametrize("queries", [77, 3])
def test_calls_from_eight_threads_do_not_disturb_each_other(queries):
    wanted = [call(seed, queries=queries)(1) for seed in range(8)]
    ways = [call(seed, queries=queries) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for got, want in zip(pool.map(lambda way: way(4), ways), wanted, strict=True):
                for one, other in zip(got, want, strict=True):
                    np.testing.assert_array_equal(one, other)
    assert calls._AT_WORK[0] == 0


FORKING = """
import os, threading
import numpy as np
from {name} import call
from attn_kernels.direct import calls
run = call(queries={queries})
want, stop = run(2), threading.Event()
def work():
    other = call(1, queries={queries})
    while not stop.is_set():
        other(2)
threads = [threading.Thread(target=work) for _ in range(3)]
for one in threads:
    one.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        same = all(np.array_equal(one, two) for one, two in zip(call(queries={queries})(2), want))
        os._exit(0 if same and calls._AT_WORK[0] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for one in threads:
    one.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
@pytest.mark.parametrize("queries", [77, 3])
def test_a_process_that_forks_while_threads_compute_does_no_harm(queries):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-W", "ignore", "-c", FORKING.format(name=__name__, queries=queries)]
    subprocess.run(program, check=True, env=environment, timeout=300)


MEMORY = """
import ctypes
import llvmlite.binding as llvm
libc, held, counted, fails = ctypes.CDLL(None), set(), [], set()
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
def malloc(size):
    counted.append(size)
    if len(counted) in fails:
        return None
    held.add(address := libc.malloc(size))
    return address
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def free(address):
    held.remove(address)
    libc.free(address)
@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
def create(*arguments):
    return 11
for name, function in (("malloc", malloc), ("free", free), ("pthread_create", create)):
    llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
from {name} import call
from attn_kernels.direct import calls
run = call(queries={queries})
run(3)
calls_of_malloc = len(counted)
assert not held and calls_of_malloc == (2 if {queries} == 77 else 1), (held, counted)
for which in range(1, calls_of_malloc + 1):
    fails = {{len(counted) + which}}
    try:
        run(3)
        raise SystemExit("it did without memory")
    except MemoryError as error:
        assert "attention found no memory to work in" in str(error), error
    assert not held and calls._AT_WORK[0] == 0
    counted.append(0)
print("held")
"""


@pytest.mark.parametrize("queries", [77, 3])
def test_memory_is_freed_and_its_lack_is_an_error(queries):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", MEMORY.format(name=__name__, queries=queries)]
    found = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert found.stdout.strip() == "held", found.stderr
