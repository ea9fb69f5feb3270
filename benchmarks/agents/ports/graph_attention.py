"""A graph attention layer on a dense matrix of edges."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class GraphAttention(nn.Module):
    def __init__(self, features=6, out=4, heads=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, features, out) / 2)
        self.target, self.source = (nn.Parameter(torch.randn(heads, out)) for _ in range(2))

    def forward(self, x, edges):
        hidden = torch.einsum("nf,hfo->hno", x, self.weight)
        target = torch.einsum("hno,ho->hn", hidden, self.target)
        source = torch.einsum("hno,ho->hn", hidden, self.source)
        scores = nn.functional.leaky_relu(target[:, :, None] + source[:, None, :], 0.2)
        scores = scores.masked_fill(edges == 0, float("-inf"))
        return nn.functional.elu(torch.einsum("hij,hjo->iho", scores.softmax(-1), hidden)).flatten(1)


def original():
    return GraphAttention()


def gat(params, x, adj):
    wx = jnp.einsum("nf,hfo->hno", x, params["weight"])
    recv = jnp.einsum("hno,ho->hn", wx, params["target"])
    send = jnp.einsum("hno,ho->hn", wx, params["source"])
    scores = jax.nn.leaky_relu(recv[:, :, None] + send[:, None, :], 0.2)
    weights = jax.nn.softmax(jnp.where(adj > 0, scores, -jnp.inf), axis=-1)
    return jax.nn.elu(jnp.einsum("hij,hjo->iho", weights, wx)).reshape(len(x), -1)


def port(module):
    names = ("weight", "target", "source")
    return gat, {name: jnp.asarray(getattr(module, name).detach().numpy()) for name in names}


def inputs(random, density=0.4):
    edges = (random.random((8, 8)) < density) | np.eye(8, dtype=bool)
    return random.normal(size=(8, 6)).astype(np.float32), edges.astype(np.float32)
