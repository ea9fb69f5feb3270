"""An MLP whose hidden units are gated, in Flax NNX."""

from __future__ import annotations

import jax
from flax import nnx


class GatedMLP(nnx.Module):
    def __init__(self, width=24, hidden=36, *, rngs):
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.gate = nnx.Linear(width, hidden, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        hidden = self.norm(x)
        return x + self.down(jax.nn.gelu(self.gate(hidden)) * self.up(hidden))


def make():
    return GatedMLP(rngs=nnx.Rngs(0))
