"""Token ids to scores of classes, by embeddings, positions and one encoder layer, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Layer(nnx.Module):
    def __init__(self, width, heads, hidden, *, rngs):
        self.self_attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.linear1 = nnx.Linear(width, hidden, rngs=rngs)
        self.linear2 = nnx.Linear(hidden, width, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(jax.nn.gelu(self.linear1(self.norm2(x)), approximate=False))


class Classifier(nnx.Module):
    def __init__(self, vocabulary=40, positions=16, width=24, classes=5, *, rngs):
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(positions, width, rngs=rngs)
        self.layer = Layer(width, 4, 32, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) * 24**0.5 + self.positions(jnp.arange(ids.shape[1]))
        return self.head(self.layer(x).mean(axis=1))


def make():
    return Classifier(rngs=nnx.Rngs(0))
