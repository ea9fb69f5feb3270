"""The negative log-likelihood of a mixture of round Gaussians."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class MixtureHead(nn.Module):
    def __init__(self, features=5, dim=3, parts=4):
        super().__init__()
        self.dim, self.parts = dim, parts
        self.weight, self.mean = nn.Linear(features, parts), nn.Linear(features, parts * dim)
        self.scale = nn.Linear(features, parts)

    def forward(self, x, y):
        log_weight = self.weight(x).log_softmax(-1)
        mean = self.mean(x).unflatten(-1, (self.parts, self.dim))
        log_scale = self.scale(x).clamp(-3.0, 2.0)
        distance = (y[:, None] - mean).square().sum(-1) * torch.exp(-2 * log_scale)
        log_density = -0.5 * distance - self.dim * log_scale - 0.5 * self.dim * math.log(2 * math.pi)
        return -torch.logsumexp(log_weight + log_density, dim=-1)


def original():
    return MixtureHead()


def nll(params, x, y):
    log_w = jax.nn.log_softmax(x @ params["weight_w"] + params["weight_b"])
    dim = y.shape[-1]
    loc = (x @ params["mean_w"] + params["mean_b"]).reshape(len(x), -1, dim)
    log_s = jnp.clip(x @ params["scale_w"] + params["scale_b"], -3.0, 2.0)
    sq = jnp.sum((y[:, None] - loc) ** 2, axis=-1)
    log_p = -0.5 * sq * jnp.exp(-2 * log_s) - dim * log_s - 0.5 * dim * jnp.log(2 * jnp.pi)
    return -jax.nn.logsumexp(log_w + log_p, axis=-1)


def port(module):
    params = {}
    for name in ("weight", "mean", "scale"):
        layer = getattr(module, name)
        params[f"{name}_w"] = jnp.asarray(layer.weight.detach().numpy().T)
        params[f"{name}_b"] = jnp.asarray(layer.bias.detach().numpy())
    return nll, params


def inputs(random):
    return tuple(random.normal(size=s).astype(np.float32) for s in ((6, 5), (6, 3)))
