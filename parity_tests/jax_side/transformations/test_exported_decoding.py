"""Steps of decoding as programs that travel: the cache goes in and comes out, and nothing calls Python."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax import export

import jax_attn
from attn_bridge import specs

MODULES = {
    "GroupedQueryAttention": specs.GroupedQueryAttentionConfig(8, 4, num_kv_heads=2, position=specs.Rotary()),
    "LinearAttention": specs.LinearAttentionConfig(8, 2),
    "GatedDeltaNet": specs.GatedDeltaNetConfig(8, 2, 4, 2, 4),
}
X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")


def made(name):
    module = getattr(jax_attn, name)(MODULES[name], rngs=nnx.Rngs(0))
    module.eval()
    return module


def calls_python(exported):
    return "callback" in exported.mlir_module()


@pytest.mark.parametrize("name", MODULES)
def test_an_exported_step_of_decoding_calls_no_python(name):
    module = made(name)
    leaves, tree = jax.tree.flatten(module(X, cache=module.init_cache(2, 9))[1])

    def step(x, *leaves):
        output, cache = module(x, cache=tree.unflatten(leaves))
        return output, *jax.tree.leaves(cache)

    program = export.export(jax.jit(step))(X[:, :1], *leaves)
    assert not calls_python(program)
    for found, wanted in zip(program.call(X[:, :1], *leaves), jax.jit(step)(X[:, :1], *leaves), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_cache_cut_back_and_reordered_is_exported():
    module = made("GroupedQueryAttention")
    leaves, tree = jax.tree.flatten(module(X, cache=module.init_cache(2, 9))[1])

    def change(length, rows, *leaves):
        return jax.tree.leaves(tree.unflatten(leaves).trim(length).reorder(rows))

    given = (np.int32(3), np.array([1, 1], np.int32), *leaves)
    program = export.export(jax.jit(change))(*given)
    assert not calls_python(program)
    for found, wanted in zip(program.call(*given), change(*given), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_an_exported_step_beyond_the_capacity_gives_nan():
    module = made("GroupedQueryAttention")
    leaves, tree = jax.tree.flatten(module(X, cache=module.init_cache(2, 5))[1])
    program = export.export(jax.jit(lambda x, *leaves: module(x, cache=tree.unflatten(leaves))[0]))(X[:, :1], *leaves)
    assert np.isnan(program.call(X[:, :1], *leaves)).all()


def test_a_full_cache_is_refused_under_jit_and_vmap():
    module = made("GroupedQueryAttention")
    cache = module(X, cache=module.init_cache(2, 5))[1]
    message = r"tokens in the cache \(5\) and new ones \(1\) must be at most capacity \(5\)"
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(jax.jit(lambda x, cache: module(x, cache=cache))(X[:, :1], cache))
    inputs = np.stack([X[:, :1]] * 3)
    caches = jax.tree.map(lambda leaf: np.stack([leaf] * 3), cache)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(jax.jit(jax.vmap(lambda x, cache: module(x, cache=cache)))(inputs, caches))
