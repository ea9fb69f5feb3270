"""Users' files: two equal modules, a wrong one, and factories that fail."""

from __future__ import annotations

TORCH = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6, eps=eps)
        self.out = nn.Linear(6, 6)
    def forward(self, x):
        return self.out(self.norm(x))

def make():
    return Net()

def example_inputs():
    return torch.arange(24.0).reshape(4, 6) % 7

module = make()
"""
FLAX = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, eps=1e-5):
        self.norm = nnx.LayerNorm(6, epsilon=eps, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
    def __call__(self, x):
        return self.out(self.norm(x))

def make():
    return Net()

def wrong():
    return Net(1e-3)
"""
BAD = """
import os
import sys
import numpy as np
import torch
from flax import linen, nnx

print("printed by the user's module")
print("printed on stderr", file=sys.stderr)

def raises():
    raise RuntimeError("no such file: weights.pt\\nand a second line")

def exits():
    sys.exit("bye")

def quits():
    sys.exit(0)

def reads():
    return input("which one? ")

def needs(size):
    return torch.nn.Linear(size, size)

def leaves():
    os._exit(0)

def number():
    return 3

def linen_module():
    return linen.Dense(3)

def function_and_weights():
    return torch.relu, {}

class Two(torch.nn.Module):
    def forward(self, x):
        return x, x

class Random(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)

class Broken(torch.nn.Module):
    def forward(self, x):
        sys.exit(5)

class Leaving(torch.nn.Module):
    def forward(self, x):
        os._exit(0)

class One(nnx.Module):
    def __call__(self, x):
        return x

class Identity(torch.nn.Module):
    def forward(self, x):
        return x

constant = 3

class Sized(nnx.Module):
    def __init__(self, width, rngs, bias=True):
        pass

async def later():
    return torch.nn.Linear(6, 6)
"""
SHAPE = ["--shape", "2,6"]
