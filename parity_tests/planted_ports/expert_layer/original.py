"""A mixture of experts, two of five for each token, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=24, hidden=20, experts=5, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x):
        shares = self.router(x).softmax(dim=-1)
        top, which = shares.topk(self.chosen, dim=-1)
        top = top / top.sum(dim=-1, keepdim=True)
        gates = torch.zeros_like(shares).scatter(-1, which, top)
        hidden = nn.functional.silu(torch.einsum("btd,edh->bteh", x, self.up))
        return torch.einsum("bteh,ehd,bte->btd", hidden, self.down, gates)


def make():
    torch.manual_seed(0)
    return Experts().eval()


def example_inputs():
    return np.random.default_rng(0).normal(size=(2, 9, 24)).astype(np.float32)
