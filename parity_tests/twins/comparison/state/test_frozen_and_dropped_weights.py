"""Frozen parameters and dropped ones keep their numbers in every sample, on both sides."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

from ..compare.sides import X, verdicts

FREQUENCIES = (0.5 / 3.0 ** np.arange(4)).astype(np.float32)


class TorchRotary(nn.Module):
    """A projection turned by angles of frozen frequencies, as rotary_embedding_torch holds them."""

    def __init__(self, *, trained=False):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.freqs = nn.Parameter(torch.from_numpy(FREQUENCIES), requires_grad=trained)

    def forward(self, x):
        angles = torch.arange(5.0)[:, None] * self.freqs
        one, two = self.project(x).chunk(2, -1)
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)


class FlaxRotary(nnx.Module):
    """Its twin, with frequencies that are a constant, or of a kind of variable."""

    def __init__(self, factor=1.0, *, kind=None):
        self.project = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        held = jnp.asarray(FREQUENCIES * factor)
        self.freqs = kind(held) if kind else nnx.data(held)

    def __call__(self, x):
        angles = jnp.arange(5.0)[:, None] * self.freqs[...]
        one, two = jnp.split(self.project(x), 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


DROP = [{"first": "freqs", "drop": "computed in Flax"}]


@pytest.mark.parametrize("trained", [False, True])
def test_a_dropped_parameter_keeps_its_numbers(trained):
    report = compare(TorchRotary(trained=trained), FlaxRotary(), X, rules=DROP, seeds=2)
    assert report.verdict == "equal"
    assert "freqs of torch is left out: computed in Flax" in report.notes


def test_a_dropped_parameter_of_other_numbers_is_different():
    assert compare(TorchRotary(), FlaxRotary(1.01), X, rules=DROP, seeds=1).verdict == "different"


def test_a_frozen_parameter_is_carried_and_not_drawn():
    report = compare(TorchRotary(), FlaxRotary(3.0, kind=nnx.Param), X, seeds=1)
    assert report.verdict == "equal"
    assert "frozen in torch, so every sample keeps the given numbers: freqs" in report.notes
    assert "grad freqs" not in verdicts(report)


def test_a_frozen_parameter_is_carried_to_state_and_no_longer_left_out():
    report = compare(TorchRotary(), FlaxRotary(3.0, kind=nnx.BatchStat), X, seeds=1)
    assert report.verdict == "equal"
    assert {one.torch: one.flax for one in report.pairing}["freqs"] == "freqs"
    assert not any("left out" in note for note in report.notes)


def test_parameters_frozen_on_the_second_side_keep_their_numbers():
    first, second = TorchRotary(trained=True), TorchRotary()
    report = compare(first, second, X, seeds=1)
    assert report.verdict == "equal"
    assert "frozen in second, so every sample keeps the given numbers: freqs" in report.notes


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return torch.tanh(x + self.weight)


class Wrong(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.zeros(8))

    def __call__(self, x):
        return jnp.tanh(x - self.weight[...])


def test_a_module_frozen_as_a_whole_is_drawn():
    report = compare(Scale().requires_grad_(False), Wrong(), X, seeds=1)
    assert report.verdict == "different"
