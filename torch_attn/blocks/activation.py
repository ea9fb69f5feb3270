"""Activations between the matrices of feed-forward layers, by their names in a config.

The twin is `jax_attn.blocks.activation`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .. import functional


def _quick_gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    wide = x.to(functional.wide_dtype(x))
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "quick_gelu": _quick_gelu,
    "relu2": lambda x: nn.functional.relu(x) ** 2,
}


class Activation(nn.Module):
    """A function of every element.

    Args:
        name: ``silu``, ``x * sigmoid(x)``; ``gelu``, ``x * Phi(x)`` with Phi the normal distribution function, or its
            approximation by tanh, ``gelu_tanh``, which is GPT-2's and the book's (arXiv 1606.08415);
            ``quick_gelu``, ``x * sigmoid(1.702 * x)``; ``relu``; or ``relu2``, its square (arXiv 2109.08668).
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply it to every element; inside in float32, in float64 for float64 input."""
        return ACTIVATIONS[self.name](x)
