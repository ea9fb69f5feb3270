"""Small differences: beside the large constant of a mask, and smaller than what hints take for agreement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

WIDTH, KEYS = 7, 5
DRAW = np.random.default_rng(11)
INPUTS = {
    "query": DRAW.normal(size=(3, WIDTH)).astype("float32"),
    "keys": DRAW.normal(size=(3, KEYS, WIDTH)).astype("float32"),
    "is_hidden": np.arange(KEYS)[None] >= np.array([[5], [3], [4]]),
}
LOWEST = float(np.finfo(np.float32).min)


class Pointer(nn.Module):
    """Returns logarithms of probabilities, of which those of hidden keys are a large constant, and their entropy."""

    def __init__(self, constant, normalised=True):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.constant, self.normalised = constant, normalised

    def forward(self, query, keys, is_hidden):
        scores = torch.einsum("bd,bkd->bk", self.project(query), keys).masked_fill(is_hidden, self.constant)
        shares = torch.softmax(scores, -1)
        entropy = -(shares * (shares + 1e-9).log()).sum(-1)
        return {"scores": torch.log_softmax(scores, -1) if self.normalised else scores, "entropy": entropy}


class FlaxPointer(nnx.Module):
    def __init__(self, constant, normalised=True, change=lambda scores, entropy: (scores, entropy)):
        self.project = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.constant, self.normalised, self.change = constant, normalised, change

    def __call__(self, query, keys, is_hidden):
        scores = jnp.einsum("bd,bkd->bk", self.project(query), keys)
        scores = jnp.where(is_hidden, self.constant, scores)
        shares = jax.nn.softmax(scores, -1)
        entropy = -(shares * jnp.log(shares + 1e-9)).sum(-1)
        scores, entropy = self.change(jax.nn.log_softmax(scores) if self.normalised else scores, entropy)
        return {"scores": scores, "entropy": entropy}


FAULTS = {
    "another output": lambda scores, entropy: (scores, entropy + 2e-5),
    "the other entries": lambda scores, entropy: (jnp.where(scores > -1e3, scores * 1.00001, scores), entropy),
    "the constant": lambda scores, entropy: (jnp.where(scores > -1e3, scores, scores * 1.00001), entropy),
}


@pytest.mark.parametrize(
    ("constant", "normalised"), [(-1e9, True), (LOWEST, False), (-65504.0, True), (-1e12, False)], ids=str
)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_differences_beside_a_large_constant_are_seen(constant, normalised, fault):
    change = (FAULTS[fault],) if fault else ()
    report = compare(Pointer(constant, normalised), FlaxPointer(constant, normalised, *change), INPUTS, seeds=2)
    assert report.verdict == ("different" if fault else "equal"), str(report)


def test_a_hint_that_holds_beside_a_large_constant_alone_is_not_given():
    report = compare(Pointer(-1e9), FlaxPointer(-1e9, change=FAULTS["another output"]), INPUTS, seeds=2)
    assert "no key" not in (report.first_divergence.hint or "")


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, query):
        return torch.softmax(self.project(query), -1)


class OtherShares(nnx.Module):
    def __init__(self):
        self.project = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, query):
        scores = self.project(query)
        powers = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        return powers / powers.sum(-1, keepdims=True) + 1e-10


def test_a_change_without_effect_does_not_explain_a_tiny_difference():
    report = compare(Shares(), OtherShares(), {"query": INPUTS["query"]}, seeds=2)
    assert report.verdict == "different"
    assert not report.first_divergence.hint
