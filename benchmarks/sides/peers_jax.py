"""Multi-head attention in plain Flax NNX, as chapter 3 of the book writes it: the peer that readers start from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class PlainMultiHeadAttention(nnx.Module):
    """Causal multi-head attention that keeps all scores in memory (book section 3.6.2).

    Args:
        d_in: width of the input.
        d_out: width of query, key, value and output, over all heads.
        context_length: longest sequence.
        num_heads: number of heads.
        rngs: source of the initial weights.
    """

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int, *, rngs: nnx.Rngs):
        del context_length  # the mask is made for the tokens at hand: a constant of a compiled function
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query = nnx.Linear(d_in, d_out, rngs=rngs)
        self.W_key = nnx.Linear(d_in, d_out, rngs=rngs)
        self.W_value = nnx.Linear(d_in, d_out, rngs=rngs)
        self.out_proj = nnx.Linear(d_out, d_out, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Return the context ``(B, T, d_out)`` of `x` ``(B, T, d_in)``."""
        batch, tokens, _ = x.shape
        keys, queries, values = (
            project(x).reshape(batch, tokens, self.num_heads, self.head_dim).transpose(0, 2, 1, 3)
            for project in (self.W_key, self.W_query, self.W_value)
        )
        scores = queries @ keys.transpose(0, 1, 3, 2)
        mask = jnp.triu(jnp.ones((tokens, tokens), bool), k=1)
        weights = jax.nn.softmax(jnp.where(mask, -jnp.inf, scores) / self.head_dim**0.5, axis=-1)
        context = (weights @ values).transpose(0, 2, 1, 3)
        return self.out_proj(context.reshape(batch, tokens, -1))
