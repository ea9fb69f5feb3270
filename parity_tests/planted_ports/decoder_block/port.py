"""A decoder's block, norms before attention and MLP, in Flax NNX."""

from __future__ import annotations

import jax
from flax import nnx


class Attention(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.heads = heads
        self.query, self.key, self.value, self.out = (nnx.Linear(width, width, rngs=rngs) for _ in range(4))

    def __call__(self, x):
        batch, length, width = x.shape
        query, key, value = (
            layer(x).reshape(batch, length, self.heads, -1) for layer in (self.query, self.key, self.value)
        )
        context = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(context.reshape(batch, length, width))


class Block(nnx.Module):
    def __init__(self, width=24, heads=4, *, rngs):
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(width, heads, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, 3 * width, rngs=rngs)
        self.down = nnx.Linear(3 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        x = self.norm2(x)
        return x + self.down(jax.nn.silu(self.up(x)))


def make():
    return Block(rngs=nnx.Rngs(0))
