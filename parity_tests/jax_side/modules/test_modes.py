"""The mode of one call of a Flax module: `deterministic` and `rngs`."""

from __future__ import annotations

import inspect

import jax
import numpy as np
import pytest
from flax import nnx

import jax_attn
from attn_bridge import specs

NORM, FEED = specs.RMSNormConfig(8), specs.FeedForwardConfig(8, 12)
ATTENTION = specs.GroupedQueryAttentionConfig(8, 4, dropout=0.5)
BLOCK = specs.DecoderBlockConfig(ATTENTION, FEED, NORM)
MAKERS = {
    "CausalAttention": lambda rngs: jax_attn.CausalAttention(8, 8, 9, 0.5, rngs=rngs),
    "MultiHeadAttentionWrapper": lambda rngs: jax_attn.MultiHeadAttentionWrapper(8, 4, 9, 0.5, 2, rngs=rngs),
    "MultiHeadAttention": lambda rngs: jax_attn.MultiHeadAttention(8, 8, 9, 0.5, 2, rngs=rngs),
    "GroupedQueryAttention": lambda rngs: jax_attn.GroupedQueryAttention(ATTENTION, rngs=rngs),
    "DecoderModel": lambda rngs: jax_attn.DecoderModel(specs.DecoderConfig(11, 8, (BLOCK,), NORM), rngs=rngs),
    "GPTModel": lambda rngs: jax_attn.GPTModel(specs.GPTModelConfig(11, 9, 8, 2, 1, 0.5), rngs=rngs),
}
CALLED = [
    variant.name
    for variant in specs.VARIANTS
    if not variant.is_function and "x" in inspect.signature(getattr(jax_attn, variant.name).__call__).parameters
]


def arguments(name: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(11, size=(2, 7)) if name.endswith("Model") else rng.normal(size=(2, 7, 8)).astype("float32")


@pytest.mark.parametrize("name", MAKERS)
def test_a_call_has_its_own_mode_and_random_numbers(name):
    module, x = MAKERS[name](nnx.Rngs(0)), arguments(name)
    streams = nnx.state(module, nnx.RngState)
    plain, key = nnx.view(module, deterministic=True)(x), jax.random.key(3)
    np.testing.assert_array_equal(module(x, deterministic=True), plain)
    dropped = module(x, rngs=key)
    module.eval()
    np.testing.assert_array_equal(module(x), plain)
    np.testing.assert_array_equal(module(x, deterministic=False, rngs=nnx.Rngs(dropout=key)), dropped)
    assert np.abs(dropped - plain).max() > 1e-3
    assert np.abs(dropped - module(x, deterministic=False, rngs=jax.random.key(4))).max() > 1e-3
    for before, after in zip(jax.tree.leaves(streams), jax.tree.leaves(nnx.state(module, nnx.RngState)), strict=True):
        assert (before == after).all()


@pytest.mark.parametrize("name", CALLED)
def test_every_class_takes_a_mode(name):
    taken = inspect.signature(getattr(jax_attn, name).__call__).parameters
    assert {"deterministic", "rngs"} <= set(taken) or name in ("LayerNorm", "RMSNorm")


def test_a_subclass_that_hands_its_keywords_on_takes_a_mode():
    class Noted(jax_attn.GroupedQueryAttention):
        def __call__(self, x, **options):
            return super().__call__(x, **options)

    module, x = Noted(ATTENTION, rngs=nnx.Rngs(0)), arguments("GroupedQueryAttention")
    np.testing.assert_array_equal(module(x, deterministic=True), nnx.view(module, deterministic=True)(x))
