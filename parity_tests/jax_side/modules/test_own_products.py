"""Linear layers whose product was replaced, inside our modules: every call goes through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_attn
from attn_bridge.specs import (
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    HyperConnectionConfig,
    LayerNormConfig,
    MixtureOfExpertsConfig,
    MultiHeadLatentAttentionConfig,
)
from jax_attn.blocks.hyper_connection import HyperConnection
from jax_attn.blocks.mixture_of_experts import MixtureOfExperts

X = np.random.default_rng(3).normal(size=(2, 5, 6)).astype(np.float32)


def drawn(module):
    drawing = np.random.default_rng(0)
    state = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda leaf: jnp.asarray(0.4 * drawing.normal(size=leaf.shape), leaf.dtype), state))
    module.eval()
    return module


def experts():
    return drawn(MixtureOfExperts(MixtureOfExpertsConfig(FeedForwardConfig(6, 5), 4, 2), rngs=nnx.Rngs(0)))


def streams():
    return drawn(HyperConnection(HyperConnectionConfig(6, 2), rngs=nnx.Rngs(0)))


def latent():
    return drawn(jax_attn.MultiHeadLatentAttention(MultiHeadLatentAttentionConfig(6, 2, 4, 4, 2, 3), rngs=nnx.Rngs(0)))


class Tripled(nnx.Module):
    """Calls an embedding and multiplies its vectors."""

    def __init__(self, embedding):
        self.inner = embedding

    def __call__(self, ids):
        return 3 * self.inner(ids)


def test_a_replaced_embedding_of_the_types_of_tokens_takes_part():
    block = DecoderBlockConfig(GroupedQueryAttentionConfig(6, 2), FeedForwardConfig(6, 5), LayerNormConfig(6))
    config = DecoderConfig(7, 6, (block,), LayerNormConfig(6), num_token_types=2)
    model, ids = drawn(jax_attn.DecoderModel(config, rngs=nnx.Rngs(0))), np.arange(6).reshape(2, 3)
    plain, own = model(ids), model.type_emb
    model.type_emb = Tripled(own)
    found = model(ids)
    model.type_emb = own
    own.embedding[...] = 3 * own.embedding[...]
    np.testing.assert_allclose(found, model(ids), rtol=0, atol=1e-5)
    assert np.abs(found - plain).max() > 1e-3


def tripled(lhs, rhs, dimensions, **options):
    return 3 * jax.lax.dot_general(lhs, rhs, dimensions, **options)


@pytest.mark.parametrize(
    ("make", "name", "call"),
    [
        (experts, "router", lambda module: module(X)),
        (streams, "projection", lambda module: module.read(X[:, :2])[0]),
        (latent, "W_key", lambda module: module(X, absorbed=True)),
        (latent, "W_value", lambda module: module(X, absorbed=True)),
    ],
)
def test_a_product_that_replaced_that_of_a_layer_is_the_one_taken(make, name, call):
    module = make()
    plain, layer = call(module), getattr(module, name)
    layer.dot_general = tripled
    found = call(module)
    layer.dot_general = jax.lax.dot_general
    layer.kernel[...] = 3 * layer.kernel[...]
    np.testing.assert_allclose(found, call(module), rtol=0, atol=1e-5)
    assert np.abs(found - plain).max() > 1e-3


@pytest.mark.parametrize(
    ("make", "name", "call"),
    [(experts, "router", MixtureOfExperts.__call__), (streams, "projection", HyperConnection.read)],
)
def test_the_precision_of_a_layer_is_that_of_its_wide_product(make, name, call):
    module = make()
    graph, state = nnx.split(module)
    assert "HIGHEST" not in str(jax.make_jaxpr(lambda state, x: call(nnx.merge(graph, state), x))(state, X[:, :2]))
    getattr(module, name).precision = jax.lax.Precision.HIGHEST
    graph, state = nnx.split(module)
    assert "HIGHEST" in str(jax.make_jaxpr(lambda state, x: call(nnx.merge(graph, state), x))(state, X[:, :2]))


class Adding(nnx.Module):
    """Calls a layer and adds to its result."""

    def __init__(self, layer):
        self.inner = layer

    def __call__(self, x):
        result = self.inner(x)
        return result + jnp.arange(result.shape[-1], dtype=result.dtype)


@pytest.mark.parametrize("name", ["W_key", "W_value"])
def test_a_layer_of_latents_that_adds_to_its_product_decodes_right_or_is_refused(name):
    module = latent()
    setattr(module, name, Adding(getattr(module, name)))
    want, cache, parts = module(X), module.init_cache(2, 5), []
    for at in range(5):
        part, cache = module(X[:, at : at + 1], cache=cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"absorbed must be False for a layer \(Adding\) that adds something"):
        module(X, absorbed=True)
