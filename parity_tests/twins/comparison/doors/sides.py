"""Pairs that hold numbers beside their parameters, and the ways to compare them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge import parity
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
TARGETS = np.random.default_rng(1).normal(size=(2, 5, 6)).astype(np.float32)


class TorchNorm(nn.Module):
    """A convolution and a norm whose statistics are neither 0 nor 1."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 6, 3, padding=1), nn.BatchNorm1d(6)
        random = np.random.default_rng(2)
        self.norm.running_mean.copy_(torch.from_numpy(random.normal(size=6)))
        self.norm.running_var.copy_(torch.from_numpy(random.uniform(0.5, 2.0, size=6)))

    def forward(self, x):
        return self.norm(self.conv(x.mT)).mT


class NnxNorm(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(1)
        self.conv, self.norm = nnx.Conv(8, 6, (3,), rngs=rngs), nnx.BatchNorm(6, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(6, (3,), name="conv")(x)
        return linen.BatchNorm(use_running_average=True, epsilon=1e-5, name="norm")(x)


def linen_norm():
    module = LinenNorm()
    return module, module.init(jax.random.key(0), jnp.asarray(X))


class TorchTable(nn.Module):
    """A learned table that is kept as a buffer is added to the inputs of a layer."""

    def __init__(self, *, frozen=False, idle=False):
        super().__init__()
        self.fc = nn.Linear(8, 6)
        table = torch.from_numpy(np.random.default_rng(3).normal(size=(5, 8)).astype(np.float32))
        if frozen:
            self.table = nn.Parameter(table, requires_grad=False)
        else:
            self.register_buffer("table", table)
        if idle:
            self.pooler = nn.Linear(6, 6)

    def forward(self, x):
        return self.fc(x + self.table)


class FlaxTable(nnx.Module):
    def __init__(self, kind=nnx.Variable, gain=1.0, numbers=None):
        self.fc = nnx.Linear(8, 6, rngs=nnx.Rngs(0))
        self.table = kind(jnp.zeros((5, 8)) if numbers is None else jnp.asarray(numbers))
        self._gain = gain

    def __call__(self, x):
        return self.fc(x + self._gain * self.table[...])


def dumped(first, second, folder, *, like=True, transfer=True, rules=None, dtypes=None):
    """Compare two sides by dumps, the second made like the first or alone."""
    dump(first, X, folder / "first", seeds=1, dtypes=dtypes)
    if like:
        dump(second, None, folder / "second", like=folder / "first", transfer=transfer, rules=rules)
    else:
        dump(second, X, folder / "second", seeds=1, dtypes=dtypes)
    return compare_dumps(folder / "first", folder / "second")


def trained(first, second, **options):
    """Train two sides for a few steps."""
    return parity.train(first, second, [(X, TARGETS)], **{"steps": 3, "lr": 1e-2, **options})
