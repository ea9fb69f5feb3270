"""Linen modules, embeddings, running statistics, shared, integer and compiled modules."""

from __future__ import annotations

import flax.linen as linen
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

from .sides import IDS, X, linear, verdicts


def test_a_linen_module_is_compared_through_to_nnx():
    class Theirs(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4, name="fc2")(jnp.tanh(linen.Dense(8, name="fc1")(x)))

    class Ours(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.fc1, self.fc2, self.factor = nn.Linear(8, 8), nn.Linear(8, 4), factor

        def forward(self, x):
            return self.fc2(torch.tanh(self.fc1(x)) * self.factor)

    theirs = nnx.bridge.ToNNX(Theirs(), rngs=nnx.Rngs(0)).lazy_init(X)
    report = compare(Ours(1.0), theirs, X, seeds=1)
    assert report.verdict == "equal"
    assert {one.torch: one.flax for one in report.pairing}["fc1.weight"] == "fc1.kernel"
    assert compare(Ours(1.001), theirs, X, seeds=1).verdict == "different"


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_embeddings_take_ids_and_lift_a_fixed_dtype(dtype):
    theirs = nnx.Embed(11, 8, dtype=dtype, rngs=nnx.Rngs(0))
    report = compare(nn.Embedding(11, 8), theirs, IDS, seeds=1)
    assert report.verdict == "equal"
    assert report.tensors[0].relative < 1e-15
    assert not report.notes


def test_running_statistics_are_weights():
    def theirs(**options):
        return nnx.BatchNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0), **options)

    ours = nn.BatchNorm1d(8)
    ours.running_mean.copy_(torch.randn(8))
    ours.running_var.copy_(torch.rand(8) + 0.5)
    rows = X.reshape(10, 8)
    report = compare(ours, theirs(), rows, seeds=1)
    assert report.verdict == "equal"
    assert {one.torch: one.flax for one in report.pairing} == {
        "weight": "scale",
        "bias": "bias",
        "running_mean": "mean",
        "running_var": "var",
    }
    assert verdicts(report).keys() == {"output", "grad input", "grad weight", "grad bias"}

    class Squared(nnx.BatchNorm):
        def __call__(self, x):
            return (x - self.mean[...]) / jnp.sqrt(self.var[...] ** 2 + 1e-5) * self.scale[...] + self.bias[...]

    assert compare(ours, Squared(8, rngs=nnx.Rngs(0)), rows, seeds=1).verdict == "different"
    report = compare(ours, theirs(), rows, seeds=1, transfer=False)
    assert verdicts(report)["weight running_var"] == "different"


def test_integer_parameters_are_transferred():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))
            self.order = nn.Parameter(torch.tensor([3, 1, 2]), requires_grad=False)

        def forward(self, x):
            return (x * self.weight)[..., self.order]

    class Theirs(nnx.Module):
        def __init__(self):
            self.weight, self.order = nnx.Param(jnp.ones(8)), nnx.Param(jnp.array([0, 0, 0]))

        def __call__(self, x):
            return (x * self.weight[...])[..., self.order[...]]

    report = compare(Ours(), Theirs(), X, seeds=1)
    assert report.verdict == "equal"
    assert verdicts(report).keys() == {"output", "grad x", "grad weight"}


def test_a_submodule_called_twice_is_compared():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(torch.tanh(self.fc(x)))

    class Theirs(nnx.Module):
        def __init__(self, times):
            self.fc, self.times = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), times

        def __call__(self, x):
            for _ in range(self.times):
                x = jnp.tanh(self.fc(x))
            return self.fc(x)

    assert compare(Ours(), Theirs(1), X, seeds=1).verdict == "equal"
    report = compare(Ours(), Theirs(2), X, seeds=1)
    assert (report.verdict, report.first_divergence.path) == ("different", "")
    assert {node.path: node.message for node in report.tree.walk()}["fc"].startswith("called 2 times in torch and 3")


def test_a_compiled_module_is_compared_uncompiled():
    ours, theirs = linear()
    assert compare(torch.compile(ours), theirs, X, seeds=1).verdict == "equal"
