"""A convolution whose channels are weighted by what they hold, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class SqueezeBlock(nnx.Module):
    def __init__(self, channels=8, *, rngs):
        self.conv = nnx.Conv(channels, channels, kernel_size=(3, 3), padding=1, feature_group_count=2, rngs=rngs)
        self.norm = nnx.GroupNorm(channels, num_groups=4, epsilon=1e-5, rngs=rngs)
        self.squeeze = nnx.Linear(channels, 4, rngs=rngs)
        self.excite = nnx.Linear(4, channels, rngs=rngs)

    def __call__(self, image):
        image = jnp.moveaxis(image, 1, -1)
        hidden = self.norm(self.conv(image))
        shares = jax.nn.sigmoid(self.excite(jax.nn.relu(self.squeeze(hidden.mean(axis=(1, 2))))))
        return jnp.moveaxis(image + hidden * shares[:, None, None, :], -1, 1)


def make():
    return SqueezeBlock(rngs=nnx.Rngs(0))
