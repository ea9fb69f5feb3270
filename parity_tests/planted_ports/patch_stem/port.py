"""Two convolutions that halve an image each time, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Stem(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Conv(3, 8, kernel_size=(3, 3), strides=2, padding="SAME", rngs=rngs)
        self.second = nnx.Conv(8, 12, kernel_size=(3, 3), strides=2, padding="SAME", rngs=rngs)

    def __call__(self, image):
        hidden = jnp.transpose(image, (0, 2, 3, 1))
        hidden = self.second(jax.nn.relu(self.first(hidden)))
        return jnp.transpose(hidden, (0, 3, 1, 2))


def make():
    return Stem(rngs=nnx.Rngs(0))
