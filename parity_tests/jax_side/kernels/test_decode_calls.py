"""Decoding on processors in JAX: the kernel that runs, a cache that no step copies or converts, linear layers."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import jax_attn
from attn_bridge import masks
from attn_bridge.specs import GroupedQueryAttentionConfig, MultiHeadLatentAttentionConfig, Rotary
from jax_attn import functional
from jax_attn.implementations import cpu_flash
from jax_attn.operations import few_rows

from ...support.calls import cover
from .attention_calls import arrays, attend, squared

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="the extra cpu is not installed")

SLOTS = 1543
"""Slots of a cache: no other array has an axis as long."""

WINDOW = masks.sliding_window(SLOTS)
MODULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grouped": (
        jax_attn.GroupedQueryAttention,
        GroupedQueryAttentionConfig(64, 4, 2, 128, position=Rotary()),
        {},
    ),
    "rolling": (
        jax_attn.GroupedQueryAttention,
        GroupedQueryAttentionConfig(64, 4, 2, 128, position=Rotary(), mask=WINDOW),
        {"rolling": True},
    ),
    "latent": (
        jax_attn.MultiHeadLatentAttention,
        MultiHeadLatentAttentionConfig(
            64, 4, latent_dim=256, nope_dim=16, rope_dim=16, value_dim=16, position=Rotary()
        ),
        {},
    ),
}


def step(label: str, dtype: str) -> tuple[Any, list[Any]]:
    """Return a step that is given the cache away, and its arguments."""
    make, config, options = MODULES[label]
    module = make(config, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype)
    graph, weights = nnx.split(module)
    cache = module.init_cache(2, 8 * SLOTS if options else SLOTS, **options)
    of = jax.jit(lambda weights, x, cache: nnx.merge(graph, weights)(x, cache=cache), donate_argnums=2)
    return of, [weights, jnp.ones((2, 1, 64), dtype), cache]


@cover.rotated(("label", "dtype"), list(MODULES), ["float16", "float32", "bfloat16"])
def test_no_step_copies_or_converts_the_cache(label, dtype):
    of, arguments = step(label, dtype)
    lowered = of.lower(*arguments)
    assert f"attn_bridge_flash_decode_{dtype}" in lowered.as_text()
    program, cache = lowered.compile(), arguments[2]
    kinds = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    shape = re.escape(",".join(map(str, cache.key.shape)))
    made = re.findall(rf"= (\w+)\[{shape}\]\S* ([\w-]+)\(", program.as_text())
    assert made
    allowed = {"parameter", "fusion", "dynamic-update-slice", "bitcast", "get-tuple-element"}
    if dtype == "bfloat16":  # its bits, in the fusion that writes a slot
        allowed |= {"bitcast-convert"}
    assert {operation for _, operation in made} <= allowed, made
    assert {kind for kind, _ in made} <= {kinds[dtype], *(["u16"] if dtype == "bfloat16" else [])}, made
    memory = program.memory_analysis()
    held = cache.key.nbytes + cache.value.nbytes
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < cache.key.nbytes


def test_the_cache_stays_where_it_is():
    of, (weights, x, cache) = step("grouped", "bfloat16")
    _, cache = of(weights, x, cache)
    places = [one.unsafe_buffer_pointer() for one in (cache.key, cache.value)]
    for _ in range(3):
        _, cache = of(weights, x, cache)
    assert places == [one.unsafe_buffer_pointer() for one in (cache.key, cache.value)]


@cover.rotated(("label", "dtype"), list(MODULES), ["float32", "bfloat16"])
def test_steps_match_the_whole_sequence(label, dtype):
    make, config, options = MODULES[label]
    module = make(config, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 600, 64)), dtype)
    want = module(x)[:, 595:]
    cache = module.init_cache(2, 8 * SLOTS if options else SLOTS, **options)
    _, cache = module(x[:, :595], cache=cache)
    graph, weights = nnx.split(module)
    of, found = jax.jit(lambda weights, x, cache: nnx.merge(graph, weights)(x, cache=cache)), []
    for n in range(595, 600):
        out, cache = of(weights, x[:, n : n + 1], cache)
        found.append(out)
    got, wanted = (np.asarray(one, "float64") for one in (jnp.concatenate(found, 1), want))
    error = 1e-5 if dtype == "float32" else 0.03
    np.testing.assert_allclose(got, wanted, rtol=0, atol=error * np.abs(wanted).max())


def test_it_is_picked_where_keys_and_values_are_large():
    def reason(**sizes: int) -> str | None:
        return functional.explain(*arrays(**sizes))["cpu_flash"]

    assert reason(queries=4, keys=9000, width=32) is None
    assert reason(queries=4, keys=300) == f"less than {cpu_flash.MIN_BYTES} bytes of keys and values"
    assert reason(queries=17, keys=9000) is None, "by the kernel for many"


def test_calls_from_eight_threads_do_not_disturb_each_other():
    inputs = [arrays(queries=3, keys=900, width=64, seed=seed) for seed in range(8)]
    function = jax.jit(lambda *one: attend(*one, mask=masks.causal().offset(890)))
    assert "attn_bridge_flash_decode_float32" in function.lower(*inputs[0]).as_text()
    want = [function(*one) for one in inputs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: function(*inputs[n % 8]), range(160)))
    for n, got in enumerate(found):
        np.testing.assert_array_equal(got, want[n % 8])


def test_an_exported_program_needs_nothing_of_ours():
    inputs = arrays(queries=3, keys=300)
    function = squared("cpu_flash", mask=masks.causal().offset(297))
    exported = export.export(jax.jit(function))(*inputs)
    assert "@attn_bridge" not in exported.mlir_module()
    np.testing.assert_allclose(exported.call(*inputs), jax.jit(function)(*inputs), rtol=1e-4)


def test_sequences_of_a_vmap_are_sequences():
    inputs = [jnp.stack([one, 2 * one]) for one in arrays(queries=3, keys=300)]
    found = jax.vmap(attend)(*inputs)
    want = jnp.stack([attend(*(one[n] for one in inputs)) for n in range(2)])
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


@contextlib.contextmanager
def compiled_here():
    """Programs don't come from the cache of compiled ones: those are not serialized whole."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else what was decided for the first program stays
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def test_executables_find_the_kernel_once_it_is_registered():
    inputs = arrays(queries=3, keys=300)
    program = jax.jit(squared("cpu_flash"))
    with compiled_here():
        payload = serialize_executable.serialize(program.lower(*inputs).compile())
    cpu_flash.register()
    np.testing.assert_array_equal(serialize_executable.deserialize_and_load(*payload)(*inputs), program(*inputs))


# ---- linear layers


def product(x: Any, matrix: Any) -> Any:
    return few_rows.dot_general(x, matrix, (((x.ndim - 1,), (0,)), ((), ())))


def few(*shape: int, seed: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "bfloat16")


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [((1, 1), 768, 768), ((16,), 777, 1040), ((3, 2), 1, 2**19), ((), 40000, 16)]
)
def test_few_rows_are_multiplied_as_many_are(rows, depth, columns):
    x, matrix = few(*rows, depth, seed=1), few(depth, columns, seed=2)
    program = jax.jit(product)
    assert "attn_bridge_few_rows" in program.lower(x, matrix).as_text()
    found = np.asarray(program(x, matrix), "float64")
    want = np.asarray(x, "float64") @ np.asarray(matrix, "float64")
    assert found.shape == (*rows, columns)
    error = np.abs(want) * 2.0**-8 + 1e-5 * np.abs(want).max()
    assert (np.abs(found - want) <= error).all()


@pytest.mark.parametrize(
    ("x", "matrix"),
    [
        (few(17, 1024, seed=1), few(1024, 1024, seed=2)),
        (few(1, 1024, seed=1), few(1024, 1000, seed=2)),
        (few(1, 64, seed=1), few(64, 64, seed=2)),
        (few(1, 1024, seed=1).astype("float32"), few(1024, 1024, seed=2).astype("float32")),
    ],
    ids=["many rows", "an odd number of columns", "a small matrix", "float32"],
)
def test_other_products_are_left_to_xla(x, matrix):
    program = jax.jit(product)
    assert "attn_bridge" not in program.lower(x, matrix).as_text()
    np.testing.assert_array_equal(program(x, matrix), jax.jit(jnp.matmul)(x, matrix))


def test_products_of_few_rows_have_derivatives_and_axes():
    x, matrix = few(2, 1, 1024, seed=1), few(1024, 1024, seed=2)

    def loss(of: Any) -> Any:
        return lambda x, matrix: (of(x, matrix).astype("float32") ** 2).sum()

    for transform in (
        lambda f: jax.grad(f, (0, 1)),
        lambda f: lambda x, matrix: jax.jvp(f, (x, matrix), (x, matrix)),
        lambda f: lambda x, matrix: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), matrix),
        lambda f: lambda x, matrix: jax.vmap(jax.grad(f), (None, 0))(x, jnp.stack([matrix, 2 * matrix])),
    ):
        found, want = (jax.tree.leaves(transform(loss(of))(x, matrix)) for of in (product, jnp.matmul))
        for got, wanted in zip(found, want, strict=True):
            got, wanted = (np.asarray(one, "float64") for one in (got, wanted))
            np.testing.assert_allclose(got, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())
    exported = export.export(jax.jit(loss(product)))(x, matrix)
    assert "attn_bridge" not in exported.mlir_module()
