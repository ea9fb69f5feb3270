"""Modules of several kinds, and how a test runs one as a side of the judge."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from attn_parity.sides.subject import Arguments

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(2, 5, 6)).astype(np.float32)


def run(subject, *arrays, cotangents=None, **options):
    arrays = arrays or (X,)
    found = subject.run(subject.weights(), Arguments(arrays))
    given = [np.random.default_rng(1).normal(size=one.shape).astype(np.float32) for one in found.outputs]
    return subject.run(subject.weights(), Arguments(arrays), cotangents or given, **options)


def everything(found):
    return [
        *found.outputs,
        *[one for one in found.input_gradients if one is not None],
        *found.parameter_gradients.values(),
    ]


def assert_same(found, wanted, rtol=0.0):
    for one, two in zip(everything(found), everything(wanted), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=rtol, atol=rtol)


def relative(found, wanted):
    """Return the largest distance of an array from its counterpart, as a share of that one's size."""
    pairs = zip(everything(found), everything(wanted), strict=True)
    return max(np.sqrt(np.mean((one - two) ** 2) / (np.mean(two**2) or 1.0)) for one, two in pairs)


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.up, self.norm, self.down, self.how = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6), how

    def inner(self, x):
        hidden = torch.softmax(self.norm(self.up(x)).float(), -1).to(x.dtype)
        return x + self.down(hidden) * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])

    def forward(self, x):
        return self.inner(x) if self.how is None else checkpoint(self.inner, x, use_reentrant=self.how)


class Stack(nn.Module):
    def __init__(self, how, segments=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.Sequential(*[Block(None if segments else how) for _ in range(3)])
        self.how, self.segments = how, segments

    def forward(self, x):
        x = self.first(x)
        if self.segments:
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.how)
        return self.blocks(x)


class Calls(nn.Module):
    def __init__(self, call, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.call = nn.Linear(6, 6), call
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.call(self, x)


def writes(self, x):
    x.mul_(2.0)
    x[0] = 0.0
    return self.linear(x)


def dense(weights, x, *, scale):
    hidden = torch.tanh(x @ weights["layers"][0]["kernel"] + weights["layers"][0]["bias"])
    return {"out": hidden * scale, "ids": weights["ids"]}
