"""Causal self-attention with rotary positions, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def rotate(x):
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=x.dtype) / half)
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = x[..., ::2], x[..., 1::2]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(x.shape)


class RotaryAttention(nnx.Module):
    def __init__(self, width=24, heads=3, *, rngs):
        self.heads = heads
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        query, key, value = (
            layer(x).reshape(batch, length, self.heads, -1) for layer in (self.query, self.key, self.value)
        )
        context = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(context.reshape(batch, length, width))


def make():
    return RotaryAttention(rngs=nnx.Rngs(0))
