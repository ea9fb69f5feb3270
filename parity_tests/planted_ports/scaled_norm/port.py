"""A norm by the root mean square, and a layer after it, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    def __init__(self, width, eps=1e-6):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        size = jax.lax.stop_gradient(jnp.mean(x**2, axis=-1, keepdims=True))
        return x * jax.lax.rsqrt(size + self.eps) * self.scale[...]


class NormedLinear(nnx.Module):
    def __init__(self, width=24, out=18, *, rngs):
        self.norm = RMSNorm(width)
        self.linear = nnx.Linear(width, out, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


def make():
    return NormedLinear(rngs=nnx.Rngs(0))
