"""A fault in a port whose layers have other names: which layer is which is told by their order, and so is the place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from attn_bridge import parity


class Mixer(torch.nn.Module):
    """A block that mixes tokens, and then channels."""

    def __init__(self):
        super().__init__()
        self.norm1, self.tok1, self.tok2 = torch.nn.LayerNorm(16), torch.nn.Linear(7, 14), torch.nn.Linear(14, 7)
        self.norm2, self.ch1, self.ch2 = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        tokens = torch.nn.functional.silu(self.tok1(self.norm1(x).transpose(1, 2)))
        x = x + self.tok2(tokens).transpose(1, 2)
        return x + self.ch2(torch.nn.functional.silu(self.ch1(self.norm2(x))))


class Port(nnx.Module):
    """The same in Flax: its norms have the opposite order where names are sorted."""

    def __init__(self, fault):
        rngs = nnx.Rngs(0)
        self.ln_tokens = nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
        self.fc_in, self.fc_out = nnx.Linear(7, 14, rngs=rngs), nnx.Linear(14, 7, rngs=rngs)
        self.ln_channels = nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
        self.mlp_in, self.mlp_out = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.fault = fault

    def __call__(self, x):
        tokens = jax.nn.silu(self.fc_in(jnp.swapaxes(self.ln_tokens(x), 1, 2)))
        x = x + jnp.swapaxes(self.fc_out(tokens), 1, 2)
        normed = self.ln_channels(x)
        act = jax.nn.gelu if self.fault == "activation" else jax.nn.silu
        return (normed if self.fault == "residual" else x) + self.mlp_out(act(self.mlp_in(normed)))


@pytest.mark.parametrize(
    ("fault", "place"),
    [("activation", ("ch1", "ch2")), ("residual", ("ch2", "the outputs")), ("", None)],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_fault_is_placed_where_it_is(fault, place):
    x = np.random.default_rng(0).normal(size=(2, 7, 16)).astype("float32")
    report = parity.compare(Mixer(), Port(fault), x)
    if place is None:
        assert report.verdict == "equal", str(report)
        return
    assert report.verdict == "different"
    text = str(report)
    assert f"between {place[0]} and {place[1]}" in text, text
    assert "they may begin to differ elsewhere" in text.replace("\n", " ")
