"""Attention with one layer for queries, keys and values, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class FusedAttention(nnx.Module):
    def __init__(self, width=24, heads=3, *, rngs):
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        fused = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (fused[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhc,bkhc->bhqk", query, key) / (width // self.heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.finfo(scores.dtype).min)
        context = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores, axis=-1), value)
        return self.out(context.reshape(batch, length, width))


def make():
    return FusedAttention(rngs=nnx.Rngs(0))
