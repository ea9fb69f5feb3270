"""Modules of several kinds, and how a test runs one as a side of the judge."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from attn_parity.sides.function import Function

RANDOM = np.random.default_rng(3)
"""What tests draw from; each gets its own, see `conftest`."""

UNIT = 2.0**-23


def normal(*shape, scale=1.0, random=None):
    return ((random or RANDOM).normal(size=shape) * scale).astype(np.float32)


def relative(one, other):
    return float(np.abs(one - other).max() / (np.abs(other).max() or 1.0))


class Twice(linen.Module):
    """One layer used twice."""

    @linen.compact
    def __call__(self, x):
        layer = linen.Dense(x.shape[-1])
        return layer(jnp.tanh(layer(x)))


X = normal(2, 3, 4)


def linen_side(module, *inputs):
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    random = np.random.default_rng(11)
    variables = jax.tree.map(lambda one: jnp.asarray(random.uniform(0.2, 0.9, one.shape), jnp.float32), variables)
    return module, variables


def wide(arrays):
    return {name: one.astype(np.float64) for name, one in arrays.items()}


class Layer(nnx.Module):
    """A feedforward layer."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def affine(weights, x, *, shift=0.0):
    return jnp.tanh(x @ weights["first"]["w"] + weights["layers"][1]) + shift


NO_TABLES = {
    "LayerNorm": lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
    "BatchNorm": lambda: nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0)),
    "attention": lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)),
    "activations": lambda: Function(lambda w, x: jax.nn.gelu(x * w) + jax.nn.silu(x) * 0.1 + 1e-6, jnp.ones(4)),
    "a mask": lambda: Function(lambda w, x: jnp.where(jnp.arange(4) < 2, x * w, -1e9) * jnp.tri(3, 4), jnp.ones(4)),
    "a bucket": lambda: Function(
        lambda w, x: x * w[(jnp.log(jnp.arange(1, 5) / 3.0) * 1.7).astype(jnp.int32) % 4], jnp.arange(1.0, 5.0)
    ),
}
