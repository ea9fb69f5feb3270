"""Attention with fewer heads of keys and values than of queries, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class GroupedAttention(nnx.Module):
    def __init__(self, width=24, heads=6, groups=2, *, rngs):
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, groups * self.size, rngs=rngs)
        self.value = nnx.Linear(width, groups * self.size, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        query = self.query(x).reshape(batch, length, self.heads, self.size)
        key, value = (layer(x).reshape(batch, length, self.groups, self.size) for layer in (self.key, self.value))
        key, value = (jnp.tile(one, (1, 1, self.heads // self.groups, 1)) for one in (key, value))
        weights = jax.nn.softmax(jnp.einsum("bqhc,bkhc->bhqk", query, key) / self.size**0.5, axis=-1)
        return self.out(jnp.einsum("bhqk,bkhc->bqhc", weights, value).reshape(batch, length, width))


def make():
    return GroupedAttention(rngs=nnx.Rngs(0))
