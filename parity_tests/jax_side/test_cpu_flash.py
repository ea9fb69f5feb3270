"""The kernels for processors: what they compute, what they read and write, who calls them, and when they step back."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_attn
from attn_bridge import masks
from jax_attn import functional
from jax_attn.cpu_kernels import blocks, compiling, words
from jax_attn.harness import lifted
from jax_attn.implementations import blocked, cpu_flash

from .attention_calls import CASES, FLOAT32, arrays, draw, hold, operands, results

BANDS = [
    label
    for label, (_, choose) in CASES.items()
    if set(options := choose(0)) <= {"mask", "sinks", "scale"}
    and (options.get("mask") is None or (masks.as_band(masks.as_mask(options["mask"])) or (None, "none"))[1] == ())
]
"""Cases of `attention_calls` that the kernels serve: no mask, or a window."""


def attend(*inputs: Any, name: str = "cpu_flash", **options: Any) -> Any:
    return functional.dot_product_attention(*inputs, implementation=name, **options)


def squared(name: str, **options: Any) -> Any:
    return lambda *inputs: (attend(*inputs, name=name, **options) ** 2).sum()


@pytest.mark.parametrize("label", BANDS)
def test_it_computes_what_the_reference_does(label):
    for seed in (0, 1):
        hold(label, seed, "float32", FLOAT32, "cpu_flash")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("label", ["no mask, odd sizes", "causal, long", "one key head", "window", "head_dim 40"])
def test_it_computes_in_16_bits_what_the_reference_does(label, dtype):
    hold(label, 0, dtype, float(jnp.finfo(dtype).eps), "cpu_flash")


@pytest.mark.parametrize("seed", range(12))
def test_any_sizes_will_do(seed):
    """Sizes that are no multiples of a block, a tile or a register, windows and offsets on either side of the keys."""
    draw_size = np.random.default_rng(500 + seed)
    key_heads, group = draw_size.integers(1, 4, 2)
    queries, keys = draw_size.integers(1, 260, 2)
    width, value_width = draw_size.integers(1, 90, 2)
    inputs = operands(1 + seed % 2, queries, keys, key_heads * group, key_heads, width, value_width, seed)
    band = masks.sliding_window(int(draw_size.integers(1, 200))) if seed % 3 else masks.causal()
    options = {"mask": band.offset(int(draw_size.integers(-60, 200))), "sinks": draw(key_heads * group, seed=seed)}
    options = options if seed % 4 else {}
    with jax.enable_x64(True):
        exact = results(inputs, options, "reference", "float64")
    plain, found = (results(inputs, options, name, "float32") for name in ("reference", "cpu_flash"))
    scale = max(np.abs(one).max() for one in exact)
    for got, want, other in zip(found, exact, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=0.0, atol=2.0 * np.abs(other - want).max() + FLOAT32 * scale)


def test_all_layouts_of_memory_will_do():
    inputs = [jnp.asarray(draw(3, 140, 4, 2, seed=n), "float32") for n in range(3)]

    def turned(*inputs: jax.Array) -> jax.Array:
        return attend(*(jnp.swapaxes(one, 2, 3) for one in inputs), mask=masks.causal())

    found = jax.jit(turned)(*inputs)
    want = attend(*(jnp.swapaxes(one, 2, 3) for one in inputs), mask=masks.causal(), name="reference")
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


# ---- numbers that are none, or large


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_what_is_not_a_number_is_seen_by_those_who_look_at_it(place, dtype):
    inputs = dict(zip(("query", "key", "value"), arrays(queries=140, keys=140, batch=1), strict=True))
    inputs = {name: one.astype(dtype) for name, one in inputs.items()}
    inputs[place] = inputs[place].at[0, 70, 1, 3].set(jnp.nan)
    found, want = (
        np.isnan(attend(*inputs.values(), mask=masks.causal(), name=name).astype("float32"))
        for name in ("cpu_flash", "reference")
    )
    must = np.zeros_like(want)
    heads = [1] if place == "query" else [2, 3]  # of the second key head
    rows = slice(70, 71) if place == "query" else slice(70, None)
    must[:, rows, heads] = np.isnan(np.where(np.arange(8) == 3, np.nan, 0.0)) if place == "value" else True
    assert found[must].all()
    assert not found[~want].any(), "no more than in the reference"


def test_a_row_that_is_no_number_gives_gradients_that_are_none():
    query, key, value = arrays(queries=140, keys=140, batch=1)
    key = key.at[0, 139, 0, :2].set(jnp.asarray([jnp.inf, -jnp.inf]))
    sinks = jnp.asarray([0.5, jnp.nan, 0.1, 0.2])

    def gradients(name: str) -> list[np.ndarray]:
        of_value = jax.grad(lambda value: attend(query, key, value, name=name).sum())(value)
        of_query = jax.grad(lambda query: attend(query, value, value, name=name, sinks=sinks).sum())(query)
        return [np.isnan(of_value), np.isnan(of_query)]

    for found, want in zip(gradients("cpu_flash"), gradients("reference"), strict=True):
        assert want.any()
        assert not want.all()
        np.testing.assert_array_equal(found, want)


def test_a_row_that_is_no_number_has_no_logarithm_of_its_sum():
    query, key, value = arrays(queries=140, keys=140)
    call = functional._checked(query.at[0, 7].set(jnp.nan), key, value, None, None, None, None, None, 0.0, None, False)
    for implementation in (cpu_flash, blocked):
        sums = implementation.attend_with_lse(call)[1]
        assert np.isnan(sums[0, :, 7]).all()
        assert np.isfinite(sums[1]).all()


@pytest.mark.parametrize("name", ["cpu_flash", "blocked"])
def test_large_sinks_of_hidden_rows_have_no_gradient(name):
    inputs = arrays(queries=140, keys=140)
    options = {"mask": masks.causal().offset(-9)}
    sinks = jnp.asarray([100.0, 1.0, 0.2, 90.0])
    found, want = (
        jax.grad(lambda sinks, one=one: squared(one, sinks=sinks, **options)(*inputs))(sinks)
        for one in (name, "reference")
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_positions_beyond_what_float32_counts_are_told_apart():
    start, job = 2**24 + 1, np.zeros(words.END, np.int64)
    job[words.KEYS], job[words.BANDED], job[words.OFFSET], job[words.SIZE] = 2**25, 1, start, 3
    scores, bounds = np.ones(8 * blocks.QUERIES, np.float32), np.zeros(2 * blocks.QUERIES, np.float32)
    numba.njit(lambda *arguments: blocks.hide(*arguments))(job, scores, 0, 64, start, 8, bounds)
    seen = np.isfinite(scores.reshape(8, -1)[:, :5].T)
    assert seen.tolist() == [[i - 3 < j <= i for j in range(8)] for i in range(5)]


# ---- transformations


@pytest.mark.parametrize("options", [{"mask": masks.causal()}, {"mask": masks.sliding_window(9)}], ids=str)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
        lambda f: jax.vmap(jax.grad(lambda q, k, v: f(q[None], k[None], v[None]), (0, 1, 2))),
        lambda f: lambda *xs: jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([xs[0], 2 * xs[0]]), *xs[1:]),
        lambda f: lambda q, k, v: jax.vmap(jax.grad(f, (0, 1, 2)), (None, 3, None))(q, jnp.stack([k, 2 * k], 3), v),
        lambda f: lambda *xs: jax.vmap(jax.vmap(jax.grad(f)))(*(jnp.stack([x, 3 * x])[None] for x in xs)),
        lambda f: jax.grad(lambda *xs: sum((one**2).sum() for one in jax.grad(f, (0, 1, 2))(*xs)), (0, 1, 2)),
    ],
    ids=["checkpoint", "vmap", "vmap of query", "vmap of key", "vmap twice", "second order"],
)
def test_transformations(transform, options):
    inputs = arrays()
    found, want = (jax.tree.leaves(transform(squared(name, **options))(*inputs)) for name in ("cpu_flash", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=2e-5 * np.abs(wanted).max())


def test_sinks_are_vmapped():
    inputs, sinks = arrays(), jnp.asarray(draw(3, 4, seed=5), "float32")

    def loss(name: str) -> Any:
        return jax.vmap(jax.grad(lambda sinks: squared(name, mask=masks.causal(), sinks=sinks)(*inputs)))

    np.testing.assert_allclose(loss("cpu_flash")(sinks), loss("reference")(sinks), rtol=0, atol=1e-3)


def test_the_logarithms_of_the_sums_have_gradients():
    inputs, sinks = arrays(queries=140, keys=140), jnp.asarray([0.3, -1.0, 2.0, 0.1])

    def ours(q, k, v, sinks):
        call = functional._checked(q, k, v, masks.causal(), None, None, None, sinks, 0.0, None, False)
        return cpu_flash.attend_with_lse(call)

    def plain(q, k, v, sinks):
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        scores = jnp.einsum("bthc,bshc->bhts", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        sums = jnp.logaddexp(jax.nn.logsumexp(scores, -1), sinks[:, None])
        return jnp.einsum("bhts,bshc->bthc", jnp.exp(scores - sums[..., None]), v), sums

    (found, pull), (want, pull_want) = (jax.vjp(one, *inputs, sinks) for one in (ours, plain))
    given = tuple(jnp.sin(jnp.arange(one.size)).reshape(one.shape) for one in found)
    for got, wanted in zip((*found, *pull(given)), (*want, *pull_want(given)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())


def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    inputs = arrays()
    gradients = jax.grad(squared("cpu_flash", mask=masks.causal()), (0, 1, 2))
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    want = jax.grad(squared("reference", mask=masks.causal()), (0, 1, 2))(*inputs)
    for got, wanted in zip(jax.jit(mapped)(*inputs), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_memory_grows_with_the_tokens_alone():
    shapes = [jax.ShapeDtypeStruct((1, 8192, 4, 8), "float32")] * 3
    for function in (squared("cpu_flash"), jax.grad(squared("cpu_flash"), (0, 1, 2))):
        memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 12 * 8192 * 4 * 8 * 4


def test_it_runs_without_jit():
    inputs = arrays(queries=140, keys=140)
    with jax.disable_jit():
        found = jax.grad(squared("cpu_flash", mask=masks.causal()))(*inputs)
    want = jax.grad(squared("cpu_flash", mask=masks.causal()))(*inputs)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


# ---- who calls, and when blocks take their place


def test_an_exported_program_needs_nothing_of_ours():
    inputs = arrays(queries=140, keys=140)
    for function in (squared("cpu_flash", mask=masks.causal()), jax.grad(squared("cpu_flash", mask=masks.causal()))):
        exported = export.export(jax.jit(function))(*inputs)
        assert "attn_bridge" not in exported.mlir_module()
        np.testing.assert_allclose(exported.call(*inputs), jax.jit(function)(*inputs), rtol=1e-4, atol=1e-4)


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
import jax, jax.numpy as jnp
from attn_bridge import masks
from jax_attn import functional
from jax_attn.cpu_kernels import processor
heads = [jax.random.normal(jax.random.key(i), (2, 150, 4, 40)) for i in range(3)]
def loss(name):
    options = {"mask": masks.sliding_window(90), "implementation": name}
    return lambda *heads: (functional.dot_product_attention(*heads, **options) ** 2).sum()
got, want = (jax.grad(loss(name), (0, 1, 2))(*heads) for name in ("cpu_flash", "reference"))
for one, two in zip(got, want):
    assert jnp.abs(one - two).max() < 1e-4, jnp.abs(one - two).max()
print(processor.LANES)
"""
AVX2 = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2"


def run(*arguments: str, **environment: str) -> str:
    program = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(
        program, check=True, env=os.environ | environment, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the registers of other processors have one size")
@pytest.mark.parametrize(("features", "lanes"), [(AVX2, "8"), (AVX2.replace("+avx2,", ""), "4")], ids=["AVX2", "AVX"])
def test_processors_with_smaller_registers_compute_the_same(features, lanes):
    assert run(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=features) == lanes


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can't be chosen here")
def test_one_core_is_enough():
    run("one core")


def test_without_numba_blocks_do_it(monkeypatch):
    inputs = arrays(queries=140, keys=140)
    monkeypatch.setattr(cpu_flash, "unavailable", cpu_flash.unavailable.__wrapped__)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find(name))
    assert "Numba" in functional.explain(*inputs)["cpu_flash"]
    assert functional.explain(*inputs)["blocked"] is None
    with pytest.raises(NotImplementedError, match="Numba, which compiles it, is not installed"):
        attend(*inputs)


@pytest.mark.parametrize(
    "trouble",
    [
        RuntimeError("cannot cache function: no locator available"),
        OSError(27, "File too large"),
        pickle.UnpicklingError("pickle data was truncated"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_where_nothing_can_be_kept_a_kernel_is_compiled_for_the_process(trouble, monkeypatch):
    compile_ = numba.cfunc

    def without_room(signature: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise trouble
        return compile_(signature, **options)

    monkeypatch.setattr(numba, "cfunc", without_room)

    def answer(pointer: Any) -> int:
        return 5

    assert compiling.entry(answer).ctypes(None) == 5


def test_where_the_kernels_do_not_load_blocks_do_it(monkeypatch):
    inputs = arrays(queries=140, keys=140)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(cpu_flash, "_fails_to_load", cpu_flash._fails_to_load.__wrapped__)
    assert "NUMBA_DISABLE_JIT" in functional.explain(*inputs)["cpu_flash"]
    with pytest.raises(NotImplementedError, match="does not run here: Numba is told to compile nothing"):
        attend(*inputs)


def test_they_are_made_for_one_version_of_the_interface(monkeypatch, tmp_path):
    """Another one would lay out in memory what they read."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 5\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(ImportError, match=r"version 0\.3 of XLA's interface, and this one is 0\.5"):
        importlib.reload(importlib.import_module("jax_attn.cpu_kernels.interface"))


def test_few_heads_for_many_cores_are_left_to_blocks(monkeypatch):
    monkeypatch.setattr(cpu_flash, "count_cores", lambda: 64)
    assert functional.explain(*arrays(queries=140, keys=140))["cpu_flash"].startswith("4 key heads in all for 64 cores")


def test_executables_find_the_kernels_once_they_are_registered():
    inputs = arrays(queries=140, keys=140)
    program = jax.jit(squared("cpu_flash"))
    payload = serialize_executable.serialize(program.lower(*inputs).compile())
    cpu_flash.register()
    loaded = serialize_executable.deserialize_and_load(*payload)
    np.testing.assert_array_equal(loaded(*inputs), program(*inputs))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_weights": True}, "never holds"),
        ({"bias": jnp.ones((70, 70))}, "has no bias"),
        ({"softcap": 2.0}, "has no softcap"),
        ({"dropout": 0.5, "rng": jax.random.key(0)}, "has no dropout"),
        ({"mask": jnp.ones((2, 70), bool)}, "no window"),
        ({"mask": masks.causal() & jnp.ones((2, 70), bool)}, "no window"),
        ({"mask": masks.prefix(3)}, "no window"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else None,
)
def test_it_says_what_it_lacks(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attend(*arrays(), **options)


def test_it_has_no_float64_and_mixes_no_dtypes():
    inputs = arrays()
    with pytest.raises(NotImplementedError, match="of float32, bfloat16, float16, got float32, bfloat16, float32"):
        attend(inputs[0], inputs[1].astype("bfloat16"), inputs[2])
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="got float64"):
        attend(*(one.astype("float64") for one in inputs))


def test_what_is_lifted_to_float64_is_not_computed_by_them():
    module = jax_attn.MultiHeadAttention(16, 16, 256, num_heads=2, rngs=nnx.Rngs(3))
    x = draw(2, 200, 16, seed=4)
    with lifted():
        found = module(jnp.asarray(x))
    with jax.enable_x64(True):
        graph, state = nnx.split(module)
        wide = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype("float64"), state))
        want, _ = wide(jnp.asarray(x), return_weights=True)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
