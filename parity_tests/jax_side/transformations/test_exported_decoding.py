"""Steps of decoding as programs that travel: the cache goes in and comes out, and nothing calls Python."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax import export

import jax_attn
from attn_bridge import masks, specs

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


def open_program(name, capacity=9, **bound):
    """Return a module, and programs that read an open number of tokens: with a new cache, and with an earlier one."""
    module = made(name)
    leaves, tree = jax.tree.flatten(module.init_cache(1, capacity))
    batch, tokens = export.symbolic_shape("b, t", **bound)
    x = jax.ShapeDtypeStruct((batch, tokens, 8), "float32")
    shown = jax.ShapeDtypeStruct((batch, capacity), "bool")
    later = [jax.ShapeDtypeStruct((batch, *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype) for leaf in leaves]

    def read(x, shown, cache):
        output, cache = module(x, attention_mask=shown, cache=cache)
        return output, *jax.tree.leaves(cache)

    begin = export.export(jax.jit(lambda x, shown: read(x, shown, module.init_cache(x.shape[0], capacity))))(x, shown)
    go_on = export.export(jax.jit(lambda x, shown, *leaves: read(x, shown, tree.unflatten(leaves))))(x, shown, *later)
    return module, begin, go_on


@pytest.mark.parametrize("name", MODULES)
def test_decoding_of_open_sizes_is_exported(name):
    module, begin, go_on = open_program(name, constraints=["t <= 9"])
    shown = np.arange(9) >= [[2], [0]]
    output, *leaves = begin.call(X[:, :3], shown)
    outputs = [output]
    for first, last in ((3, 4), (4, 5)):
        output, *leaves = go_on.call(X[:, first:last], shown, *leaves)
        outputs.append(output)
    wanted = module(X, attention_mask=shown[:, :5])
    np.testing.assert_allclose(np.concatenate(outputs, 1)[shown[:, :5]], wanted[shown[:, :5]], rtol=1e-4, atol=1e-5)


def test_an_open_number_of_tokens_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="capacity") as caught:
        open_program("GroupedQueryAttention")
    assert str(caught.value) == (
        'number of tokens (t) must be at most capacity (9): give jax.export.symbolic_shape constraints=["t <= 9"]'
    )


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


OTHER_TOKENS = {
    "padding of the new token": (np.ones((2, 1), bool), r"2-D attention mask \(2, 1\) must be .* cached and new \(6\)"),
    "padding of more tokens": (np.ones((2, 7), bool), r"2-D attention mask \(2, 7\) must be .* cached and new \(6\)"),
    "an array": (np.ones((2, 1, 1, 4), bool), r"attention mask \(2, 1, 1, 4\) must broadcast to .* \(2, 4, 1, 6\)"),
    "documents": (np.ones((2, 5), int), r"ids \(5\) must be one per token, got keys up to 6"),
}


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("given", OTHER_TOKENS)
def test_a_mask_over_other_tokens_is_refused_under_jit(given, rolling):
    config = MODULES["GroupedQueryAttention"].replace(mask=masks.sliding_window(3))
    module = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0))
    cache = module(X, cache=module.init_cache(2, 8, rolling=rolling))[1]
    array, message = OTHER_TOKENS[given]

    def step(x, cache, array):
        return module(x, cache=cache, attention_mask=masks.documents(array) if given == "documents" else array)[0]

    with pytest.raises(ValueError, match=message):
        step(X[:, :1], cache, array)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(jax.jit(step)(X[:, :1], cache, array))
    leaves, tree = jax.tree.flatten(cache)
    program = export.export(jax.jit(lambda x, array, *leaves: step(x, tree.unflatten(leaves), array)))
    assert np.isnan(program(X[:, :1], array, *leaves).call(X[:, :1], array, *leaves)).all()


def test_a_mask_over_another_context_is_refused_under_jit():
    module = jax_attn.CrossAttention(specs.CrossAttentionConfig(8, 2, d_context=8), rngs=nnx.Rngs(0))
    cache = module(X, context=X[:, :4], cache=module.init_cache(2, 6))[1]
    step = jax.jit(lambda x, cache, mask: module(x, cache=cache, attention_mask=mask)[0])
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"mask \(2, 3\) must be .* cached and new \(4\)"
    ):
        jax.block_until_ready(step(X, cache, np.ones((2, 3), bool)))
    shown = np.array([[True, True, False, True], [True] * 4])
    wanted = module(X, context=X[:, :4], attention_mask=shown)
    np.testing.assert_allclose(step(X, cache, shown), wanted, rtol=1e-5, atol=1e-6)
