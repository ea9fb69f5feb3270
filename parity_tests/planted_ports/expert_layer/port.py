"""A mixture of experts, two of five for each token, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Experts(nnx.Module):
    def __init__(self, width=24, hidden=20, experts=5, chosen=2, *, rngs):
        self.chosen = chosen
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (experts, width, hidden)) * width**-0.5)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (experts, hidden, width)) * hidden**-0.5)

    def __call__(self, x):
        shares = jax.nn.softmax(self.router(x), axis=-1)
        top, which = jax.lax.top_k(shares, self.chosen)
        gates = jnp.sum(jax.nn.one_hot(which, shares.shape[-1], dtype=x.dtype) * top[..., None], axis=-2)
        hidden = jax.nn.silu(jnp.einsum("btd,edh->bteh", x, self.up[...]))
        return jnp.einsum("bteh,ehd,bte->btd", hidden, self.down[...], gates)


def make():
    return Experts(rngs=nnx.Rngs(0))
