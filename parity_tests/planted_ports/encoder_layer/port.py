"""A transformer's encoder layer, norms after the residual, in Flax NNX."""

from __future__ import annotations

import jax
from flax import nnx


class EncoderLayer(nnx.Module):
    def __init__(self, width=24, heads=4, hidden=40, *, rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(jax.nn.relu(self.up(x))))


def make():
    return EncoderLayer(rngs=nnx.Rngs(0))
