"""Causal attention that sees a window of four tokens, itself among them, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class WindowedAttention(nnx.Module):
    def __init__(self, width=24, heads=4, window=4, *, rngs):
        self.heads, self.window = heads, window
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        query, key, value = (one.reshape(batch, length, self.heads, -1) for one in jnp.split(self.qkv(x), 3, axis=-1))
        ago = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
        seen = (ago >= 0) & (ago <= self.window)
        scores = jnp.einsum("bqhc,bkhc->bhqk", query, key) * query.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return self.out(jnp.einsum("bhqk,bkhc->bqhc", weights, value).reshape(batch, length, width))


def make():
    return WindowedAttention(rngs=nnx.Rngs(0))
