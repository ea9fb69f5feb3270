"""Source files of modules that commands judge in processes of their own."""

from __future__ import annotations

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, act=torch.relu):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.act = act

    def forward(self, x):
        return self.act(self.fc(x))

def tanh():
    return Net(torch.tanh)
"""
"""A layer with one of two activations."""
