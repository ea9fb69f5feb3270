"""Small pairs of modules, and how a test compares them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
TABLE = np.linspace(0.1, 2.3, 8, dtype=np.float32)
IDS = np.array([[1, 2, 3, 9, 0], [4, 4, 7, 8, 2]])


class TorchSide(nn.Module):
    """A module of one function and the parameters that it uses."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        random = np.random.default_rng(1)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.from_numpy(random.normal(size=shape).astype(np.float32))))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class FlaxSide(nnx.Module):
    """Its twin, with other initial weights."""

    def __init__(self, function, **shapes):
        self.function = function
        random = np.random.default_rng(2)
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.asarray(random.normal(size=shape), jnp.float32)))

    def __call__(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def judge(ours, theirs=None, inputs=X, *, shapes=None, **options):
    """Compare two functions of a module and its inputs, one per side, or one for both."""
    shapes = {"w": (8,)} if shapes is None else shapes
    torch_side = ours if isinstance(ours, nn.Module) else TorchSide(ours, **shapes)
    theirs = ours if theirs is None else theirs
    flax_side = theirs if isinstance(theirs, nnx.Module) else FlaxSide(theirs, **shapes)
    return compare(torch_side, flax_side, inputs, **{"seeds": 1} | options)


def linear(**options):
    return nn.Linear(8, 4), nnx.Linear(8, 4, rngs=nnx.Rngs(0), **options)


def scale(m, x):
    return x * m.w


def verdicts(report):
    return {one.name: one.verdict for one in report.tensors}


def jnp_or_torch(x):
    return torch if isinstance(x, torch.Tensor) else jnp
