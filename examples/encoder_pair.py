"""A port with a mistake: torch's encoder layer in Flax, whose layer norms kept Flax's own default eps.

    attn-bridge compare examples/encoder_pair.py:torch_side examples/encoder_pair.py:flax_side --shape 2,7,16
"""

from __future__ import annotations

import jax
from flax import nnx
from torch import nn


def torch_side() -> nn.Module:
    """Return torch's own encoder layer."""
    return nn.TransformerEncoderLayer(d_model=16, nhead=4, dim_feedforward=32, dropout=0.0, batch_first=True)


def flax_side() -> nnx.Module:
    """Return its port."""
    return EncoderLayer(16, 4, 32, rngs=nnx.Rngs(0))


class EncoderLayer(nnx.Module):
    """Self-attention and a feed-forward net, each with a residual and a norm behind it."""

    def __init__(self, d_model: int, num_heads: int, hidden: int, *, rngs: nnx.Rngs):
        self.self_attn = nnx.MultiHeadAttention(num_heads, d_model, decode=False, rngs=rngs)
        self.linear1 = nnx.Linear(d_model, hidden, rngs=rngs)
        self.linear2 = nnx.Linear(hidden, d_model, rngs=rngs)
        self.norm1 = nnx.LayerNorm(d_model, rngs=rngs)  # torch's eps is 1e-5, Flax's 1e-6
        self.norm2 = nnx.LayerNorm(d_model, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x ``(B, T, d_model)`` after one layer."""
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))
