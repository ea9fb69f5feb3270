"""The embedding of a diffusion step and of a class, which may be dropped."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from torch import nn


class Conditioning(nn.Module):
    def __init__(self, width=10, bands=6, classes=5):
        super().__init__()
        self.bands, self.classes = bands, classes
        self.first, self.second = nn.Linear(2 * bands, width), nn.Linear(width, width)
        self.label = nn.Embedding(classes + 1, width)

    def forward(self, t, label, drop):
        steps = torch.arange(self.bands, dtype=t.dtype) / self.bands
        angles = t[:, None] * torch.exp(-math.log(10000.0) * steps)
        hidden = self.second(nn.functional.silu(self.first(torch.cat([angles.cos(), angles.sin()], dim=-1))))
        return hidden + self.label(torch.where(drop > 0, self.classes, label))


def original():
    return Conditioning()


class TimeEmbed(linen.Module):
    width: int = 10
    bands: int = 6
    classes: int = 5

    @linen.compact
    def __call__(self, t, label, drop):
        freqs = jnp.exp(-math.log(10000.0) * jnp.arange(self.bands) / self.bands)
        args = t[:, None] * freqs
        h = jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)
        h = linen.Dense(self.width, name="first")(h)
        h = linen.Dense(self.width, name="second")(linen.silu(h))
        label = jnp.where(drop > 0, self.classes, label)
        return h + linen.Embed(self.classes + 1, self.width, name="label")(label)


def port(module):
    def dense(layer):
        return {"kernel": layer.weight.detach().numpy().T, "bias": layer.bias.detach().numpy()}

    embedding = {"embedding": module.label.weight.detach().numpy()}
    params = {"first": dense(module.first), "second": dense(module.second), "label": embedding}
    return TimeEmbed(), {"params": jax.tree.map(jnp.asarray, params)}


def inputs(random, most=999.0):
    t = random.uniform(0, most, size=5).astype(np.float32)
    return t, random.integers(0, 5, 5), np.array([0, 1, 0, 0, 1])
