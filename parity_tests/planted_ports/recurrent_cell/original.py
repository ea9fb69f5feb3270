"""One step of a gated recurrent unit, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width)
        self.state = nn.Linear(width, 3 * width)

    def forward(self, x, state):
        r1, z1, n1 = self.inputs(x).chunk(3, dim=-1)
        r2, z2, n2 = self.state(state).chunk(3, dim=-1)
        reset, update = torch.sigmoid(r1 + r2), torch.sigmoid(z1 + z2)
        new = torch.tanh(n1 + reset * n2)
        return (1 - update) * new + update * state


def make():
    torch.manual_seed(0)
    return Cell().eval()


def example_inputs():
    random = np.random.default_rng(0)
    return tuple(random.normal(size=(3, 24)).astype(np.float32) for _ in range(2))
