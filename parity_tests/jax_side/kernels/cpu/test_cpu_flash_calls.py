"""Who calls the kernels for processors, from which threads and programs, and when blocks take their place."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.experimental import serialize_executable

import jax_attn
from attn_bridge import masks
from attn_kernels.compiler import processor
from attn_kernels.xla import calls as xla
from attn_parity.frameworks.jax.running.promotion import promoted
from jax_attn import functional
from jax_attn.implementations import block_plan, cpu_flash, flash_primitives, unavailable
from parity_tests.support.calls import cover

from ..attention_calls import arrays, attend, draw, some, squared


def test_an_exported_program_needs_nothing_of_ours():
    inputs = arrays(queries=140, keys=140)
    masked = squared("cpu_flash", mask=masks.causal() & some(2, 140, seed=1))
    options = {"softcap": 2.0, "dropout": 0.3, "rng": jax.random.key(1)}

    def biased(*inputs):
        return squared("cpu_flash", bias=inputs[0][:, :, 0, :1].reshape(2, 1, 1, 140), **options)(*inputs)

    def biased_by_rows(*inputs):
        bias = jnp.swapaxes(inputs[0][:1], 1, 2)[..., :1] * jnp.cos(jnp.arange(140.0))
        return squared("cpu_flash", bias=bias, **options)(*inputs)

    functions = [squared("cpu_flash", mask=masks.causal()), masked, *map(jax.grad, (masked, biased, biased_by_rows))]
    for function in functions:
        exported = export.export(jax.jit(function))(*inputs)
        assert "@attn_bridge_flash" not in exported.mlir_module()
        np.testing.assert_allclose(exported.call(*inputs), jax.jit(function)(*inputs), rtol=1e-4, atol=1e-4)


def test_an_exported_gradient_loses_no_precision(monkeypatch):
    """In 16 bits, blocks in loops must not take the slope of a row from a context that was rounded."""
    monkeypatch.setattr(block_plan, "UNROLLED", 100)
    query, key, value = arrays(queries=300, keys=300, batch=1, seed=4)
    inputs = [one.astype("bfloat16") for one in (query, key + 4.0, value + 4.0)]
    sinks = jnp.asarray([0.3, -1.0, 2.0, 40.0])
    function = jax.grad(squared("cpu_flash", mask=masks.causal(), sinks=sinks), (0, 1, 2))
    exported = export.export(jax.jit(function))(*inputs).call(*inputs)
    with jax.enable_x64(True):
        wide = [one.astype("float64") for one in inputs]
        exact = jax.grad(squared("reference", mask=masks.causal(), sinks=sinks), (0, 1, 2))(*wide)
    for got, here, want in zip(exported, function(*inputs), exact, strict=True):
        there, own = (np.abs(np.asarray(one).astype("float64") - np.asarray(want)).max() for one in (got, here))
        assert there < 2 * own


def test_calls_from_many_threads_do_not_disturb_each_other():
    inputs = [arrays(queries=150, keys=150, seed=seed) for seed in range(8)]
    function = jax.jit(jax.grad(squared("cpu_flash", mask=masks.causal()), (0, 1, 2)))
    want = [function(*one) for one in inputs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: function(*inputs[n % 8]), range(160)))
    for n, got in enumerate(found):
        for one, other in zip(got, want[n % 8], strict=True):
            np.testing.assert_array_equal(one, other)


PROGRAM = """
import os, sys
if "one core" in sys.argv:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
elif len(sys.argv) > 1:
    import llvmlite.binding as llvm
    features = llvm.get_host_cpu_features()
    features |= {name: name in sys.argv[1].split(",") for name in features}
    llvm.get_host_cpu_name, llvm.get_host_cpu_features = lambda: "generic", lambda: features
import jax, jax.numpy as jnp
from attn_bridge import masks
from jax_attn import functional
from attn_kernels.compiler import processor
heads = [jax.random.normal(jax.random.key(i), (2, 150, 4, 40)) for i in range(3)]
def loss(name):
    options = {"mask": masks.sliding_window(90) & seen, "implementation": name, "softcap": 3.0, "bias": bias}
    options |= {"dropout": 0.2, "rng": jax.random.key(9)}
    return lambda *heads: (functional.dot_product_attention(*heads, **options) ** 2).sum()
seen = jax.random.uniform(jax.random.key(3), (2, 1, 150, 150)) < 0.8
bias = jax.random.normal(jax.random.key(4), (4, 1, 1)) * jnp.cos(jnp.arange(150 * 150)).reshape(150, 150)
got, want = (jax.grad(loss(name), (0, 1, 2))(*heads) for name in ("cpu_flash", "reference"))
for one, two in zip(got, want):
    assert jnp.abs(one - two).max() < 1e-4, jnp.abs(one - two).max()
print(processor.LANES)
"""
AVX2 = "64bit,cmov,cx8,fxsr,mmx,sse,sse2,sse3,ssse3,sse4.1,sse4.2,popcnt,avx,avx2,fma,f16c,bmi,bmi2"


SMALLER = {8: AVX2, 4: AVX2.replace("avx2,", "")}
"""Numbers in a register -> features of a processor with such ones, AVX2 and AVX."""


def run(*arguments: str) -> str:
    program = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(program, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the registers of other processors have one size")
@cover.some("lanes", list(SMALLER), always=[8])
def test_processors_with_smaller_registers_compute_the_same(lanes):
    assert run(SMALLER[lanes]) == str(lanes)


MEMORY = """
import ctypes, threading, time
import llvmlite.binding as llvm
import jax, jax.numpy as jnp
from jax_attn import functional
libc, held, calls, fails = ctypes.CDLL(None), set(), [], set()
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
def malloc(size):
    calls.append(size)
    if len(calls) in fails:
        return None
    held.add(address := libc.malloc(size))
    return address
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def free(address):
    held.remove(address)
    libc.free(address)
for name, function in (("malloc", malloc), ("free", free)):
    llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
heads = [jax.random.normal(jax.random.key(i), (2, 150, 4, 8)) for i in range(3)]
program = jax.jit(jax.grad(lambda *heads: functional.dot_product_attention(*heads, implementation="cpu_flash").sum()))
def run():
    jax.block_until_ready(program(*heads))
    for _ in range(60_000):  # a thread that came late still looks at the job
        if not held:
            return
        time.sleep(0.01)
    raise SystemExit(f"{len(held)} blocks of memory are held")
for _ in range(20):
    run()
each = len(calls) // 20
assert each == 4, each  # a job and its room, forward and backward
for which in range(each):
    fails = {len(calls) + 1 + which}
    try:
        run()
        raise SystemExit(f"it did without memory {which}")
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        assert "attention found no memory to work in" in str(error), error
run()
print("held")
"""


def test_memory_is_given_back_and_its_lack_is_an_error():
    program = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert program.stdout.strip() == "held", program.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can't be chosen here")
def test_one_core_is_enough():
    run("one core")


def test_without_llvmlite_blocks_do_it(monkeypatch):
    inputs = arrays(queries=140, keys=140)
    monkeypatch.setattr(cpu_flash, "_lacks", cpu_flash._lacks.__wrapped__)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llvmlite" else find(name))
    assert "llvmlite" in functional.explain(*inputs)["cpu_flash"]
    assert "llvmlite" in unavailable()["cpu_flash"]
    assert functional.explain(*inputs)["blocked"] is None
    with pytest.raises(NotImplementedError, match="llvmlite, which compiles it, is not installed"):
        attend(*inputs)


def test_where_the_kernels_do_not_load_blocks_do_it(monkeypatch):
    def refuse() -> None:
        raise RuntimeError("LLVM does not take it")

    inputs = arrays(queries=140, keys=140)
    monkeypatch.setattr(xla, "forward", refuse)
    monkeypatch.setattr(cpu_flash, "_fails_to_load", cpu_flash._fails_to_load.__wrapped__)
    assert "LLVM does not take it" in functional.explain(*inputs)["cpu_flash"]
    with pytest.raises(NotImplementedError, match="does not run here: its kernels do not load: LLVM does not take it"):
        attend(*inputs)


@pytest.mark.parametrize("version", ["0.2", "0.6", "1.3"])
def test_they_are_made_for_some_versions_of_the_interface(version, monkeypatch, tmp_path):
    """Another one would lay out in memory what they read."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    major, minor = version.split(".")
    header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}\n")
    interface = importlib.import_module("attn_kernels.xla.interface")
    before = vars(interface).copy()
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    try:
        with pytest.raises(ImportError, match=rf"versions 0\.3 to 0\.5 of XLA's interface, and this one is {version}"):
            importlib.reload(interface)
    finally:
        vars(interface).update(before)


def test_kernels_that_fail_to_load_are_reported_unavailable(monkeypatch):
    """`doctor` and `check` ask: what they call available runs."""

    def refuse() -> None:
        raise ImportError("they know versions 0.3 to 0.5 of XLA's interface, and this one is 0.6")

    assert unavailable()["cpu_flash"] is None
    monkeypatch.setattr(xla, "forward", refuse)
    monkeypatch.setattr(cpu_flash, "_fails_to_load", cpu_flash._fails_to_load.__wrapped__)
    assert "this one is 0.6" in unavailable()["cpu_flash"]


def test_few_heads_for_many_cores_are_left_to_blocks(monkeypatch):
    monkeypatch.setattr(cpu_flash, "usable_cores", lambda: 64)
    assert functional.explain(*arrays(queries=140, keys=140))["cpu_flash"].startswith("4 key heads in all for 64 cores")


def test_executables_find_the_kernels_once_they_are_registered():
    inputs = arrays(queries=140, keys=140)
    program = jax.jit(squared("cpu_flash"))
    payload = serialize_executable.serialize(program.lower(*inputs).compile())
    cpu_flash.register()
    loaded = serialize_executable.deserialize_and_load(*payload)
    np.testing.assert_array_equal(loaded(*inputs), program(*inputs))


def test_a_dtype_multiplied_in_pairs_has_separate_kernels(monkeypatch):
    """Others share theirs, so that each process compiles what it needs."""
    monkeypatch.setattr(processor, "pairs", lambda: "any")
    inputs = arrays(queries=140, keys=140, seed=3)
    function = jax.grad(squared("cpu_flash"))

    def called(dtype: str) -> set[str]:
        given = [one.astype(dtype) for one in inputs]
        return set(re.findall(r"@(attn_bridge_\w+)", jax.jit(function).lower(*given).as_text()))

    of_all = {"attn_bridge_flash_forward", "attn_bridge_flash_backward"}
    assert called("float32") == called("float16") == of_all
    assert called("bfloat16") == {f"{name}_bfloat16_any" for name in of_all}
    monkeypatch.setattr(flash_primitives, "register_target", lambda name, compiled: registered.append(name))
    registered: list[str] = []
    cpu_flash.register()
    assert len(registered) == len(set(registered))
    assert called("bfloat16") | of_all <= set(registered)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_weights": True}, "never holds"),
        ({"bias": jnp.ones((70, 1))}, r"the bias \(70, 1\) is the same for all keys"),
        ({"dropout": 0.5, "rng": jax.random.key(0, impl="rbg")}, "partitionable Threefry only"),
        ({"mask": masks.sliding_window(3) | masks.sliding_window(3).offset(-9)}, "are no interval"),
        ({"mask": masks.causal() | jnp.ones((2, 70), bool)}, r"joins arrays or paddings by \|"),
        (
            {"mask": masks.as_mask(jnp.ones((2, 70), bool)) & jnp.ones((70, 70), bool)[None, None]},
            r"the arrays \(2, 1, 1, 70\), \(1, 1, 70, 70\) of the mask would make a larger one together",
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else None,
)
def test_it_says_what_it_lacks(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attend(*arrays(), **options)


@pytest.mark.parametrize("keys", [2, 70])
def test_a_bias_without_axes_is_the_same_for_all_keys(keys):
    with pytest.raises(NotImplementedError, match=r"the bias \(\) is the same for all keys"):
        attend(*arrays(keys=keys), bias=jnp.ones(()))


@dataclasses.dataclass(frozen=True)
class Backwards(masks.Mask):
    """Later queries see earlier keys."""

    def interval(self, queries):
        return 60 - queries, 70 - queries


def test_intervals_that_go_back_are_left_to_others():
    with pytest.raises(NotImplementedError, match="the intervals go back"):
        attend(*arrays(), mask=Backwards())


def test_it_has_no_float64_and_mixes_no_dtypes():
    inputs = arrays()
    with pytest.raises(NotImplementedError, match="of float32, bfloat16, float16, got float32, bfloat16, float32"):
        attend(inputs[0], inputs[1].astype("bfloat16"), inputs[2])
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="got float64"):
        attend(*(one.astype("float64") for one in inputs))


def test_calls_promoted_to_float64_do_not_use_the_kernels():
    module = jax_attn.MultiHeadAttention(16, 16, 256, num_heads=2, rngs=nnx.Rngs(3))
    x = draw(2, 200, 16, seed=4)
    with promoted():
        found = module(jnp.asarray(x))
    with jax.enable_x64(True):
        graph, state = nnx.split(module)
        wide = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype("float64"), state))
        want, _ = wide(jnp.asarray(x), return_weights=True)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
