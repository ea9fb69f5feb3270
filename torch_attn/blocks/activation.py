"""Activations between the matrices of feed-forward layers, by their names in a config.

The twin is `jax_attn.blocks.activation`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.specs.blocks.feed_forward import XIELU as NUMBERS

from .. import functional
from ..layer import Layer
from ..random import JaxRngs


def _quick_gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    wide = functional.widen(x)
    # The approximation of GELU by a sigmoid (arXiv 1606.08415, section 2).
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


XIELU_START = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3)), "beta": 0.5, "eps": -1e-6}
"""Initial numbers of `XIELU`: both slopes at 0.8 (arXiv 2411.13010)."""


class XIELU(Layer):
    """xIELU: ``softplus(alpha_p) * x**2 + beta * x`` where x is positive, an exponential elsewhere (arXiv 2411.13010).

    There it is ``(expm1(min(x, eps)) - x) * (beta + softplus(alpha_n)) + beta * x``. `beta` and `eps` get no gradients.

    Args:
        rngs: taken like in every module; an activation draws nothing.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(self, *, rngs: JaxRngs | None = None, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        for name, start in XIELU_START.items():
            setattr(self, name, nn.Parameter(torch.full(NUMBERS[name], start, device=device, dtype=dtype)))

    @torch.no_grad()
    def _reset_own(self) -> None:
        for name, start in XIELU_START.items():
            getattr(self, name).fill_(start)

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply it to every element; inside in float32, in float64 for float64 input."""
        wide = functional.widen(x)
        alpha_p, alpha_n, beta, eps = (getattr(self, name).to(wide.dtype) for name in XIELU_START)
        beta, eps = beta.detach(), eps.detach()
        positive = nn.functional.softplus(alpha_p) * wide * wide
        negative = (torch.expm1(torch.minimum(wide, eps)) - wide) * (beta + nn.functional.softplus(alpha_n))
        return (torch.where(wide > 0, positive, negative) + beta * wide).to(x.dtype)
