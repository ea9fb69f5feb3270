"""A transformer's encoder layer, norms after the residual, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class EncoderLayer(nn.Module):
    def __init__(self, width=24, heads=4, hidden=40):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x):
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.down(torch.relu(self.up(x))))


def make():
    torch.manual_seed(0)
    return EncoderLayer().eval()


def example_inputs():
    return np.random.default_rng(0).normal(size=(2, 9, 24)).astype(np.float32)
