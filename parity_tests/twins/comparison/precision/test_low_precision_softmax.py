"""A softmax in bfloat16 inside a float32 module costs gradients their precision too, and no probe excuses that."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from attn_bridge import parity
from parity_tests.support.calls import cover

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)


class Attends(torch.nn.Module):
    def __init__(self, low):
        super().__init__()
        self.qkv, self.low = torch.nn.Linear(8, 24), low

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.mT / 8**0.5
        weights = torch.softmax(scores.bfloat16(), -1).float() if self.low else torch.softmax(scores, -1)
        return weights @ value


class Port(nnx.Module):
    def __init__(self, low):
        self.qkv, self.low = nnx.Linear(8, 24, rngs=nnx.Rngs(0)), low

    def __call__(self, x):
        query, key, value = jnp.split(self.qkv(x), 3, -1)
        scores = query @ key.mT / 8**0.5
        weights = jax.nn.softmax(scores.astype(jnp.bfloat16) if self.low else scores).astype(x.dtype)
        return weights @ value


@cover.some("low", ["torch", "flax"], always=["flax"])
def test_gradients_that_a_low_softmax_costs_are_not_excused(low):
    report = parity.compare(Attends(low == "torch"), Port(low == "flax"), X)
    assert report.verdict == "precision"
    assert {one.verdict for one in report.tensors} == {"precision"}
    assert not any("softmax recomputed" in note for note in report.notes)
