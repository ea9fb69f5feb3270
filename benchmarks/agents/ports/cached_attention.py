"""A norm and attention that continues a cache of keys and values, with a bias per distance."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn


class CachedAttention(nn.Module):
    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, keys, values):
        length, past = x.shape[1], keys.shape[2]
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        scores = query @ keys.mT / query.shape[-1] ** 0.5
        distance = torch.arange(past, past + length)[:, None] - torch.arange(past + length)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, dtype=x.dtype)
        scores = scores - slopes[:, None, None] * distance.to(x.dtype)
        mixed = scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ values
        return x + self.out(mixed.transpose(1, 2).flatten(2)), keys, values


def original():
    return CachedAttention()


class Attention(nnx.Module):
    def __init__(self, dim, num_heads, *, rngs):
        self.num_heads = num_heads
        self.norm = nnx.RMSNorm(dim, epsilon=1e-5, rngs=rngs)
        self.qkv = nnx.Linear(dim, 3 * dim, rngs=rngs)
        self.proj = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x, keys, values):
        b, t, d = x.shape
        past = keys.shape[2]
        qkv = self.qkv(self.norm(x)).reshape(b, t, 3, self.num_heads, -1)
        q, k, v = jnp.transpose(qkv, (2, 0, 3, 1, 4))
        keys = jnp.concatenate([keys, k], axis=2)
        values = jnp.concatenate([values, v], axis=2)
        pos = past + jnp.arange(t)
        dist = pos[:, None] - jnp.arange(past + t)[None, :]
        slopes = 0.5 ** jnp.arange(1, self.num_heads + 1)
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, keys) / jnp.sqrt(q.shape[-1])
        logits = jnp.where(dist >= 0, logits - slopes[:, None, None] * dist, -1e30)
        y = jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(logits), values)
        return x + self.proj(y.reshape(b, t, d)), keys, values


def port(module):
    net = Attention(12, 3, rngs=nnx.Rngs(0))
    net.norm.scale[...] = module.norm.weight.detach().numpy()
    for mine, theirs in ((net.qkv, module.qkv), (net.proj, module.out)):
        mine.kernel[...], mine.bias[...] = theirs.weight.detach().numpy().T, theirs.bias.detach().numpy()
    return net


def inputs(random, past=5):
    return tuple(random.normal(size=s).astype(np.float32) for s in ((2, 4, 12), (2, 3, past, 4), (2, 3, past, 4)))
