"""A float64 module is judged in float64 on both sides, also where JAX holds float32 because x64 is off."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare, train
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps

X = np.random.default_rng(0).standard_normal((4, 5))

NOTE = "the Flax side holds float32, as jax_enable_x64 is off; both sides are judged in float64"


class Net(nnx.Module):
    def __init__(self, between=lambda x: x, factor=1.0):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(5, 7, rngs=rngs), nnx.Linear(7, 3, rngs=rngs)
        self.between, self.factor = between, factor

    def __call__(self, x):
        return self.b(jnp.tanh(self.between(self.a(x)))) * self.factor


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


@pytest.mark.parametrize("flax_first", [False, True])
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_a_float64_module_beside_float32_weights_is_equal(flax_first, mode):
    sides = (Net(), net()) if flax_first else (net(), Net())
    report = compare(*sides, X, seeds=1, modes=(mode,))
    assert report.verdict == "equal"
    assert {one.dtype for one in report.tensors} == {"float64"}
    assert NOTE in report.notes


def test_a_cast_to_float32_inside_a_float64_module_is_precision():
    report = compare(net(), Net(lambda x: x.astype(jnp.float32).astype(x.dtype)), X, seeds=1, localise=False)
    assert report.verdict == "precision"


def test_a_fault_below_float32_of_a_float64_module_is_different():
    assert compare(net(), Net(factor=1 + 1e-9), X, seeds=1, localise=False).verdict == "different"


def test_dumps_of_a_float64_module_are_equal(tmp_path):
    dump(net(), X, tmp_path / "first", seeds=1)
    dump(Net(), None, tmp_path / "second", like=tmp_path / "first")
    report = compare_dumps(tmp_path / "first", tmp_path / "second")
    assert report.verdict == "equal"
    assert {one.dtype for one in report.tensors} == {"float64"}
    assert NOTE in report.notes


def test_float32_modules_are_judged_in_float32_without_a_note():
    report = compare(net().float(), Net(), X, seeds=1)
    assert report.verdict == "equal"
    assert {one.dtype for one in report.tensors} == {"float32"}
    assert NOTE not in report.notes


def test_a_float64_module_is_trained_in_float64():
    targets = np.random.default_rng(1).standard_normal((4, 3))
    report = train(net(), Net(), [(X, targets)], steps=2)
    assert report.verdict == "equal"
    assert "2 steps of Sequential (torch) and Net (Flax) in float64" in report.summary()
