"""An MLP whose hidden units are gated, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class GatedMLP(nn.Module):
    def __init__(self, width=24, hidden=36):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.down(nn.functional.gelu(self.gate(hidden)) * self.up(hidden))


def make():
    torch.manual_seed(0)
    return GatedMLP().eval()


def example_inputs():
    return np.random.default_rng(0).normal(size=(2, 9, 24)).astype(np.float32)
