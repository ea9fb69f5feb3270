"""Gradients that one side stops and the other does not: the hint names the operand and its line."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn import functional

from attn_bridge import parity

LINE = r"\S*test_stopped_gradients.py:\d+"

RANDOM = np.random.default_rng(4)


def draw(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def contrastive(weights, query, key):
    query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1).detach()
    return (query @ key.T).log_softmax(-1).diagonal().sum()


def contrastive_of(stopped):
    def call(weights, query, key):
        query, key = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
        key = jax.lax.stop_gradient(key) if "key" in stopped else key
        query = jax.lax.stop_gradient(query) if "query" in stopped else query
        return jnp.diag(jax.nn.log_softmax(query @ key.T)).sum()

    return call


class Quantiser(nn.Module):
    """The nearest vectors of a codebook (VQ-VAE, arXiv 1711.00937)."""

    def __init__(self):
        super().__init__()
        self.codebook, self.into = nn.Embedding(9, 4), nn.Linear(6, 4)

    def forward(self, x):
        x = self.into(x)
        nearest = self.codebook(torch.cdist(x, self.codebook.weight).argmin(-1))
        return x + (nearest - x).detach(), functional.mse_loss(nearest, x.detach())


class OtherQuantiser(nnx.Module):
    def __init__(self):
        self.codebook, self.into = nnx.Embed(9, 4, rngs=nnx.Rngs(0)), nnx.Linear(6, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        x = self.into(x)
        distances = jnp.square(x[..., None, :] - self.codebook.embedding[...]).sum(-1)
        nearest = self.codebook(distances.argmin(-1))
        return x + jax.lax.stop_gradient(nearest - x), jnp.square(nearest - x).mean()


@pytest.mark.parametrize(
    ("stopped", "change"),
    [
        (("key", "query"), "a gradient not stopped"),
        ((), "the gradient of the operand of transpose stopped"),
    ],
)
def test_a_gradient_that_is_stopped_on_one_side_is_named(stopped, change):
    sides = parity.function(contrastive, {}), parity.function(contrastive_of(stopped), {})
    divergence = parity.compare(*sides, (draw(5, 4), draw(5, 4)), seeds=1).first_divergence
    assert divergence.direction == "backward"
    assert re.fullmatch(rf"with {change} in Flax \({LINE}\), or with .* both sides agree", divergence.hint)


def test_a_gradient_that_is_stopped_in_both_needs_no_hint():
    sides = parity.function(contrastive, {}), parity.function(contrastive_of(("key",)), {})
    assert parity.compare(*sides, (draw(5, 4), draw(5, 4)), seeds=1).verdict == "equal"


def test_the_operand_of_a_loss_without_a_detached_code_is_named():
    divergence = parity.compare(Quantiser(), OtherQuantiser(), draw(2, 3, 6), seeds=1).first_divergence
    assert divergence.direction == "backward"
    change = "the gradient of the second operand of sub stopped"
    other = "a gradient not stopped in torch"
    assert re.fullmatch(
        rf"with {change} in Flax \({LINE} `nearest - x`\), or with {other} \({LINE} `x.detach\(\)`\) both sides agree",
        divergence.hint,
    )


@pytest.mark.parametrize("is_first", [False, True])
def test_a_detached_operand_of_torch_is_named(is_first):
    def attached(weights, x, y):
        return (x * y).sum() + (x - y).square().sum()

    def detached(weights, x, y):
        return (x * y).sum() + (x.detach() - y).square().sum()

    sides = [parity.function(call, {}, framework="torch") for call in (attached, detached)]
    inputs = draw(5, 4), draw(5, 4)
    hint = parity.compare(*(sides[::-1] if is_first else sides), inputs, seeds=1).first_divergence.hint
    expected = "of the first operand of sub stopped" if is_first else "a gradient not stopped"
    assert expected in hint, hint


class Twice(nn.Module):
    """Two views of one input, of which each predicts the other (BYOL, arXiv 2006.07733)."""

    def __init__(self):
        super().__init__()
        self.into, self.predict = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        def loss(p, z):
            return (p * z.detach()).sum()

        x, y = self.into(x), self.into(y)
        return 0.5 * (loss(self.predict(x), y) + loss(self.predict(y), x))


class OtherTwice(nnx.Module):
    def __init__(self, stopped, scale=0.5):
        self.into, self.predict = nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.stopped, self.scale = stopped, scale

    def __call__(self, x, y):
        def loss(p, z):
            return (p * (jax.lax.stop_gradient(z) if self.stopped else z)).sum()

        x, y = self.into(x), self.into(y)
        there = self.scale * loss(self.predict(x), y)
        return there + self.scale * loss(self.predict(y), x)


def test_a_line_that_runs_twice_is_changed_as_one():
    divergence = parity.compare(Twice(), OtherTwice(False), (draw(4, 6), draw(4, 6)), seeds=1).first_divergence
    change = "the gradient of the second operand of mul stopped"
    other = "a gradient not stopped in torch"
    pattern = rf"with {change} in Flax \({LINE}\), or with {other} \({LINE}\) both sides agree"
    assert re.fullmatch(pattern, divergence.hint), divergence.hint


def test_another_scale_of_a_loss_is_a_number_in_its_code():
    divergence = parity.compare(Twice(), OtherTwice(True, 0.7), (draw(4, 6), draw(4, 6)), seeds=1).first_divergence
    assert re.fullmatch(rf"with 0.7 for 0.5 in torch \({LINE}\) both sides agree", divergence.hint)
