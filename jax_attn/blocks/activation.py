"""Activations between the matrices of feed-forward layers, by their names in a config.

The twin is `torch_attn.blocks.activation`.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from .. import functional

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}


class Activation(nnx.Module):
    """A function of every element.

    Args:
        name: ``silu``, ``x * sigmoid(x)``; ``gelu``, ``x * Phi(x)`` with Phi the normal distribution function, or its
            approximation by tanh, ``gelu_tanh``, which is GPT-2's and the book's (arXiv 1606.08415);
            ``quick_gelu``, ``x * sigmoid(1.702 * x)``; ``relu``; or ``relu2``, its square (arXiv 2109.08668).
    """

    def __init__(self, name: str):
        self.name = name

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Apply it to every element; inside in float32, in float64 for float64 input."""
        return ACTIVATIONS[self.name](x.astype(functional.wide_dtype(x))).astype(x.dtype)
