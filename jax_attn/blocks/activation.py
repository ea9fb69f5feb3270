"""Activations between the matrices of feed-forward layers, by their names in a config.

The twin is `torch_attn.blocks.activation`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.specs.blocks.feed_forward import XIELU as NUMBERS

from .. import functional
from ..random import Rngs

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    # The approximation of GELU by a sigmoid (arXiv 1606.08415, section 2).
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
        return ACTIVATIONS[self.name](functional.widen(x)).astype(x.dtype)


XIELU_START = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3)), "beta": 0.5, "eps": -1e-6}
"""Initial numbers of `XIELU`: both slopes at 0.8 (arXiv 2411.13010)."""


class XIELU(nnx.Module):
    """xIELU: ``softplus(alpha_p) * x**2 + beta * x`` where x is positive, an exponential elsewhere (arXiv 2411.13010).

    There it is ``(expm1(min(x, eps)) - x) * (beta + softplus(alpha_n)) + beta * x``. `beta` and `eps` get no gradients.

    Args:
        rngs: taken like in every module; an activation draws nothing.
        param_dtype: dtype of the parameters.
        dtype: taken like in every module; the output has the dtype of the input.
    """

    def __init__(self, *, rngs: Rngs, param_dtype: DTypeLike = jnp.float32, dtype: DTypeLike | None = None):
        for name, start in XIELU_START.items():
            setattr(self, name, nnx.Param(jnp.full(NUMBERS[name], start, param_dtype)))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Apply it to every element; inside in float32, in float64 for float64 input."""
        wide = functional.widen(x)
        alpha_p, alpha_n, beta, eps = (getattr(self, name)[...].astype(wide.dtype) for name in XIELU_START)
        beta, eps = jax.lax.stop_gradient(beta), jax.lax.stop_gradient(eps)
        positive = jax.nn.softplus(alpha_p) * wide * wide
        negative = (jnp.expm1(jnp.minimum(wide, eps)) - wide) * (beta + jax.nn.softplus(alpha_n))
        return (jnp.where(wide > 0, positive, negative) + beta * wide).astype(x.dtype)
