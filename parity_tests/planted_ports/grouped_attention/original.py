"""Attention with fewer heads of keys and values than of queries, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class GroupedAttention(nn.Module):
    def __init__(self, width=24, heads=6, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, groups * self.size)
        self.value = nn.Linear(width, groups * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = (
            layer(x).view(batch, length, self.groups, self.size).transpose(1, 2) for layer in (self.key, self.value)
        )
        key, value = (one.repeat_interleave(self.heads // self.groups, dim=1) for one in (key, value))
        weights = (query @ key.transpose(-2, -1) / self.size**0.5).softmax(dim=-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


def make():
    torch.manual_seed(0)
    return GroupedAttention().eval()


def example_inputs():
    return np.random.default_rng(0).normal(size=(2, 9, 24)).astype(np.float32)
