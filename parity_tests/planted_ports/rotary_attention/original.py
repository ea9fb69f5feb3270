"""Causal self-attention with rotary positions, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def rotate(x):
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RotaryAttention(nn.Module):
    def __init__(self, width=24, heads=3):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        context = nn.functional.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(context.transpose(1, 2).reshape(batch, length, width))


def make():
    torch.manual_seed(0)
    return RotaryAttention().eval()


def example_inputs():
    return np.random.default_rng(0).normal(size=(2, 9, 24)).astype(np.float32)
