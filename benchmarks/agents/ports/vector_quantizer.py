"""A vector quantiser with a straight-through estimator, and its two losses."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn


class VectorQuantizer(nn.Module):
    def __init__(self, width=6, codes=9, dim=4, commitment=0.25):
        super().__init__()
        self.commitment = commitment
        self.encode, self.decode = nn.Linear(width, dim), nn.Linear(dim, width)
        self.codes = nn.Parameter(torch.randn(codes, dim) / 2)

    def forward(self, x):
        z = self.encode(x)
        distance = (z[..., None, :] - self.codes).square().sum(-1)
        chosen = self.codes[distance.argmin(-1)]
        loss = (chosen - z.detach()).square().mean() + self.commitment * (chosen.detach() - z).square().mean()
        return self.decode(z + (chosen - z).detach()), loss


def original():
    return VectorQuantizer()


class Quantizer(nnx.Module):
    def __init__(self, width, codes, dim, beta=0.25, *, rngs):
        self.beta = beta
        self.to_code = nnx.Linear(width, dim, rngs=rngs)
        self.from_code = nnx.Linear(dim, width, rngs=rngs)
        self.codebook = nnx.Param(jax.random.normal(rngs.params(), (codes, dim)))

    def __call__(self, x):
        sg = jax.lax.stop_gradient
        z = self.to_code(x)
        book = self.codebook[...]
        dist = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ book.T + jnp.sum(book**2, -1)
        q = book[jnp.argmin(dist, axis=-1)]
        codebook_loss = jnp.mean((q - sg(z)) ** 2)
        commit_loss = jnp.mean((sg(q) - z) ** 2)
        loss = codebook_loss + self.beta * commit_loss
        return self.from_code(z + sg(q - z)), loss


def port(module):
    net = Quantizer(6, 9, 4, rngs=nnx.Rngs(0))
    for mine, theirs in ((net.to_code, module.encode), (net.from_code, module.decode)):
        mine.kernel[...], mine.bias[...] = theirs.weight.detach().numpy().T, theirs.bias.detach().numpy()
    net.codebook[...] = module.codes.detach().numpy()
    return net


def inputs(random):
    return (random.normal(size=(2, 7, 6)).astype(np.float32),)
