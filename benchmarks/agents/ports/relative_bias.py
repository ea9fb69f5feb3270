"""T5's encoder attention: no scale, and a bias per bucket of distances."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class BucketedAttention(nn.Module):
    def __init__(self, width=12, heads=2, buckets=8, furthest=10):
        super().__init__()
        self.heads, self.buckets, self.furthest = heads, buckets, furthest
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias = nn.Embedding(buckets, heads)

    def bucket(self, length):
        relative = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        half = self.buckets // 2
        exact, distance = half // 2, relative.abs()
        far = torch.log(distance.clamp(min=1).double() / exact) / math.log(self.furthest / exact) * (half - exact)
        far = (exact + far.long()).clamp(max=half - 1)
        return (relative > 0).long() * half + torch.where(distance < exact, distance, far)

    def forward(self, x):
        query, key, value = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = query @ key.mT + self.bias(self.bucket(x.shape[1])).permute(2, 0, 1)
        return self.o((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def original():
    return BucketedAttention()


def buckets(length, num_buckets=8, max_distance=10):
    n = num_buckets // 2
    rel = np.arange(length)[None, :] - np.arange(length)[:, None]
    dist, exact = np.abs(rel), n // 2
    large = exact + (np.log(np.maximum(dist, 1) / exact) / math.log(max_distance / exact) * (n - exact)).astype(int)
    large = np.minimum(large, n - 1)
    return np.where(rel > 0, n, 0) + np.where(dist < exact, dist, large)


def attention(params, x):
    b, t, d = x.shape
    heads = params["bias"].shape[1]
    q, k, v = ((x @ params[name]).reshape(b, t, heads, d // heads) for name in "qkv")
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    logits = logits + jnp.moveaxis(params["bias"][buckets(t)], -1, 0)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
    return y.reshape(b, t, d) @ params["o"]


def port(module):
    params = {name: jnp.asarray(getattr(module, name).weight.detach().numpy().T) for name in "qkvo"}
    return attention, params | {"bias": jnp.asarray(module.bias.weight.detach().numpy())}


def inputs(random, length=18):
    return (random.normal(size=(2, length, 12)).astype(np.float32),)
