"""Limits of implementations, and the choice among them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import attn_bridge
import jax_attn
from attn_bridge import masks
from jax_attn import functional

from .attention_calls import arrays


def test_gradients_do_not_take_the_reference():
    picked = []

    def loss(query: jax.Array) -> jax.Array:
        picked.append(next(name for name, reason in functional.explain(query, query, query).items() if reason is None))
        return functional.dot_product_attention(query, query, query).sum()

    for transform in (jax.grad, lambda f: jax.grad(jax.checkpoint(f)), jax.jacrev, lambda f: jax.grad(jax.jit(f))):
        transform(loss)(jnp.ones((1, 200, 2, 8)))
    assert set(picked) == {"cpu_flash"}


def test_explanations_name_the_picked_implementation():
    long, short = arrays(queries=200, keys=200), arrays(queries=20, keys=20)
    reasons = attn_bridge.explain_attention(*long, mask=masks.causal())
    assert next(name for name, reason in reasons.items() if reason is None) == "cpu_flash"
    assert reasons["blocked"] is None
    assert reasons == attn_bridge.explain_attention(*long, mask=masks.causal(), implementation="blocked")
    either = attn_bridge.explain_attention(*long, mask=masks.causal() | jnp.ones((2, 200), bool), softcap=3.0)
    assert next(name for name, reason in either.items() if reason is None) == "blocked"
    assert "NVIDIA GPU" in reasons["cudnn"] or "16" in reasons["cudnn"]
    reasons = functional.explain(*short)
    assert "fewer scores" in reasons["blocked"]
    assert functional.explain(*long, return_weights=True)["reference"] is None
    assert "weights" in functional.explain(*long, return_weights=True)["blocked"]


def test_a_forced_implementation_refuses_unsupported_calls():
    with pytest.raises(
        NotImplementedError, match="implementation 'blocked' does not support this call: it never holds"
    ):
        functional.dot_product_attention(*arrays(), return_weights=True, implementation="blocked")
    inputs, options = arrays(), {"dropout": 0.5, "rng": jax.random.key(0), "implementation": "blocked"}
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="partitionable Threefry"):
        functional.dot_product_attention(*inputs, **options)


def test_modules_reach_the_kernels():
    module = jax_attn.MultiHeadAttention(16, 16, 256, num_heads=2, rngs=nnx.Rngs(0))
    text = str(jax.make_jaxpr(lambda x: nnx.clone(module)(x))(jnp.ones((2, 256, 16))))
    assert "attn_bridge_flash_forward" in text
    assert "256,256]" not in text
