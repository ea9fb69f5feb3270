"""One step of a gated recurrent unit, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Cell(nnx.Module):
    def __init__(self, width=24, *, rngs):
        self.inputs = nnx.Linear(width, 3 * width, rngs=rngs)
        self.state = nnx.Linear(width, 3 * width, rngs=rngs)

    def __call__(self, x, state):
        r1, z1, n1 = jnp.split(self.inputs(x), 3, axis=-1)
        r2, z2, n2 = jnp.split(self.state(state), 3, axis=-1)
        reset, update = jax.nn.sigmoid(r1 + r2), jax.nn.sigmoid(z1 + z2)
        new = jnp.tanh(n1 + reset * n2)
        return update * new + (1 - update) * state


def make():
    return Cell(rngs=nnx.Rngs(0))
