"""Pairs that many people port: torch's own layers and their Flax counterparts, as factories for `attn-bridge compare`.

attn-bridge compare examples/pairs.py:torch_norm examples/pairs.py:flax_norm --shape 2,7,16
"""

from __future__ import annotations

import jax
from flax import nnx
from torch import nn


def torch_linear() -> nn.Module:
    """Return a linear layer."""
    return nn.Linear(16, 24)


def flax_linear() -> nnx.Module:
    """Return its counterpart; the kernel is the transposed weight."""
    return nnx.Linear(16, 24, rngs=nnx.Rngs(0))


def torch_norm() -> nn.Module:
    """Return a layer norm."""
    return nn.LayerNorm(16)


def flax_norm() -> nnx.Module:
    """Return its counterpart with Flax's default eps, which is not torch's."""
    return nnx.LayerNorm(16, rngs=nnx.Rngs(0))


def flax_norm_with_torch_eps() -> nnx.Module:
    """Return its counterpart with torch's eps."""
    return nnx.LayerNorm(16, epsilon=1e-5, rngs=nnx.Rngs(0))


def torch_attention() -> nn.Module:
    """Return multi-head attention; called with query, key and value."""
    return nn.MultiheadAttention(16, 4, batch_first=True)


def flax_attention() -> nnx.Module:
    """Return its counterpart."""
    return nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))


def torch_encoder() -> nn.Module:
    """Return an encoder layer."""
    return nn.TransformerEncoderLayer(d_model=16, nhead=4, dim_feedforward=32, dropout=0.0, batch_first=True)


def flax_encoder() -> nnx.Module:
    """Return a port of it with a mistake: its norms kept Flax's default eps."""
    return EncoderLayer(16, 4, 32, epsilon=1e-6, rngs=nnx.Rngs(0))


def flax_encoder_with_torch_eps() -> nnx.Module:
    """Return a right port of it."""
    return EncoderLayer(16, 4, 32, epsilon=1e-5, rngs=nnx.Rngs(0))


class EncoderLayer(nnx.Module):
    """Self-attention and a feed-forward net, each with a residual and a norm behind it."""

    def __init__(self, d_model: int, num_heads: int, hidden: int, *, epsilon: float, rngs: nnx.Rngs):
        self.self_attn = nnx.MultiHeadAttention(num_heads, d_model, decode=False, rngs=rngs)
        self.linear1 = nnx.Linear(d_model, hidden, rngs=rngs)
        self.linear2 = nnx.Linear(hidden, d_model, rngs=rngs)
        self.norm1 = nnx.LayerNorm(d_model, epsilon=epsilon, rngs=rngs)
        self.norm2 = nnx.LayerNorm(d_model, epsilon=epsilon, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x ``(B, T, d_model)`` after one layer."""
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))
