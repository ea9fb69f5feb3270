"""A norm by the root mean square, and a layer after it, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.scale


class NormedLinear(nn.Module):
    def __init__(self, width=24, out=18):
        super().__init__()
        self.norm = RMSNorm(width)
        self.linear = nn.Linear(width, out)

    def forward(self, x):
        return self.linear(self.norm(x))


def make():
    torch.manual_seed(0)
    return NormedLinear().eval()


def example_inputs():
    return np.random.default_rng(0).normal(size=(2, 9, 24)).astype(np.float32)
