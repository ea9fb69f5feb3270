"""Causal attention with rotary positions; groups of query heads share keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class RotaryAttention(nn.Module):
    def __init__(self, width=16, heads=4, kv_heads=2, head_dim=6):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def rotate(self, x):
        steps = torch.arange(self.head_dim // 2, dtype=x.dtype) / (self.head_dim // 2)
        angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), 10000.0**-steps)
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(self, x):
        length = x.shape[1]
        query, key, value = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                             for f in (self.query, self.key, self.value))  # fmt: skip
        shared = self.heads // self.kv_heads
        key, value = (t.repeat_interleave(shared, dim=1) for t in (self.rotate(key), value))
        scores = self.rotate(query) @ key.mT / self.head_dim**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


def original():
    return RotaryAttention()


def rope(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-2])[:, None] * 10000.0 ** -(jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def attention(params, x, heads=4, kv_heads=2):
    b, t, _ = x.shape
    q = (x @ params["query"]).reshape(b, t, heads, -1).swapaxes(1, 2)
    k = (x @ params["key"]).reshape(b, t, kv_heads, -1).swapaxes(1, 2)
    v = (x @ params["value"]).reshape(b, t, kv_heads, -1).swapaxes(1, 2)
    k = jnp.repeat(k, heads // kv_heads, axis=1)
    v = jnp.repeat(v, heads // kv_heads, axis=1)
    logits = rope(q) @ rope(k).swapaxes(-1, -2) / q.shape[-1] ** 0.5
    logits = jnp.where(jnp.tri(t, k=0, dtype=bool), logits, -jnp.inf)
    y = jax.nn.softmax(logits) @ v
    return y.swapaxes(1, 2).reshape(b, t, -1) @ params["out"]


def port(module):
    names = ("query", "key", "value", "out")
    return attention, {name: jnp.asarray(getattr(module, name).weight.detach().numpy().T) for name in names}


def inputs(random):
    return (random.normal(size=(2, 7, 16)).astype(np.float32),)
