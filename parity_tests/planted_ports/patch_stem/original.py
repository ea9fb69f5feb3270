"""Two convolutions that halve an image each time, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, kernel_size=3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 12, kernel_size=3, stride=2, padding=1)

    def forward(self, image):
        return self.second(torch.relu(self.first(image)))


def make():
    torch.manual_seed(0)
    return Stem().eval()


def example_inputs():
    return np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
