"""Differences that no float32 run of either side could show: literals of float32 accuracy, and branches of formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn import functional

from attn_bridge.parity import compare

X = (np.random.default_rng(3).normal(size=(4, 6)) * 3).astype(np.float32)
ROOT = math.sqrt(2 / math.pi)


class TorchPart(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class FlaxPart(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


class TorchPair(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), TorchPart(function), nn.Linear(8, 5)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class FlaxPair(nnx.Module):
    def __init__(self, function):
        rngs = nnx.Rngs(0)
        self.fc1, self.act, self.fc2 = nnx.Linear(6, 8, rngs=rngs), FlaxPart(function), nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        return self.fc2(self.act(self.fc1(x)))


def verdict(first, second, x=X):
    torch.manual_seed(0)
    return compare(TorchPair(first), FlaxPair(second), x)


def torch_gelu(root=ROOT, cubic=0.044715):
    return lambda x: 0.5 * x * (1.0 + torch.tanh(root * (x + cubic * x**3)))


def flax_gelu(root=ROOT, cubic=0.044715):
    return lambda x: 0.5 * x * (1.0 + jnp.tanh(root * (x + cubic * x**3)))


def fused_torch(x):
    return functional.gelu(x, approximate="tanh")


def flax_softplus(limit):
    return lambda x: jnp.where(x > limit, x, jnp.log1p(jnp.exp(jnp.minimum(x, limit + 1.0))))


def torch_softplus(limit):
    return lambda x: torch.where(x > limit, x, torch.log1p(torch.exp(x.clamp(max=limit + 1.0))))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch_gelu(0.79788456), nnx.gelu),
        (torch_gelu(0.797884561), flax_gelu()),
        (fused_torch, flax_gelu(0.79788456)),
        (torch_gelu(0.79788456), flax_gelu(0.7978845608)),
        (torch_gelu(float(torch.tensor(2 / np.pi).sqrt())), flax_gelu()),
        (lambda x: x * 0.5 * (1 + torch.erf(x / 1.4142135)), lambda x: nnx.gelu(x, approximate=False)),
    ],
)
def test_a_literal_of_float32_accuracy_is_equal_with_its_place(first, second):
    report = verdict(first, second, X / 3)
    assert report.verdict == "equal"
    assert report.first_divergence is None
    (note,) = [note for note in report.notes if "no float32 run" in note]
    assert "in act" in note
    assert "of the largest value" in note


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch_gelu(ROOT * (1 + 1e-6)), nnx.gelu),
        (torch_gelu(0.7978854), flax_gelu()),
        (torch_gelu(0.797885), flax_gelu()),
        (fused_torch, flax_gelu(0.79788536)),
        (torch_gelu(cubic=0.04471504), flax_gelu()),
        (torch_gelu(0.79788456), flax_gelu(0.79788456, 0.04471504)),
        (
            lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
            lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1.00001e-5),
        ),
    ],
)
def test_a_constant_off_by_a_millionth_stays_different(first, second):
    report = verdict(first, second)
    assert report.verdict == "different"
    assert report.first_divergence.path == "act"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (functional.softplus, jax.nn.softplus),
        (lambda x: functional.softplus(x, beta=2.0), lambda x: jax.nn.softplus(2.0 * x) / 2.0),
        (torch_softplus(20.0), jax.nn.softplus),
        (functional.softplus, flax_softplus(25.0)),
        (torch_softplus(18.0), flax_softplus(22.0)),
    ],
)
def test_a_branch_below_half_a_float32_unit_is_equal(first, second):
    report = verdict(first, second, 20 * X)
    assert report.verdict == "equal"
    assert any("no float32 run" in note for note in report.notes)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (functional.hardsigmoid, jax.nn.hard_sigmoid, "equal"),
        (lambda x: functional.celu(x, 1.3), lambda x: jax.nn.celu(x, 1.3), "equal"),
        (functional.hardsigmoid, lambda x: jnp.clip(x + 3, 0, 6) * 0.1666665, "different"),
        (lambda x: functional.celu(x, 1.3), lambda x: jax.nn.celu(x, 1.3000013), "different"),
    ],
)
def test_kernels_whose_gradients_hold_float32_constants_are_equal(first, second, expected):
    report = verdict(first, second, 2 * X)
    assert report.verdict == expected
    assert any("no float32 run" in note for note in report.notes) == (expected == "equal")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: functional.softplus(x, threshold=10.0), jax.nn.softplus),
        (torch_softplus(12.0), jax.nn.softplus),
        (functional.softplus, flax_softplus(14.0)),
    ],
)
def test_a_branch_that_float32_shows_stays_different(first, second):
    report = verdict(first, second, 20 * X)
    assert report.verdict == "different"
    assert report.first_divergence.path == "act"


def test_a_literal_before_a_fault_is_not_where_it_begins():
    class Faulty(FlaxPair):
        def __call__(self, x):
            return self.fc2(self.act(self.fc1(x))) * (1.0 + 1e-6)

    torch.manual_seed(0)
    report = compare(TorchPair(torch_gelu(0.79788456)), Faulty(flax_gelu()), X / 3)
    assert report.verdict == "different"
    assert report.first_divergence.between == ("fc2", "")
