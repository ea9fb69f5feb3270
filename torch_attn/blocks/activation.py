"""What stands between the matrices of feed-forward layers, by its name in a config.

The twin is `jax_attn.blocks.activation`.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


class Activation(nn.Module):
    """A function of every element.

    Args:
        name: ``silu``, ``x * sigmoid(x)``; ``gelu``, ``x * Phi(x)`` with Phi the normal distribution function, or its
            approximation by tanh, ``gelu_tanh``, which is GPT-2's and the book's (arXiv 1606.08415); or ``relu``.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Apply it to every element; inside in float32, in float64 for float64 input."""
        return ACTIVATIONS[self.name](x)
