"""`parity.train` carries what `compare` carries beside parameters, and judges what training changes of it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch import nn

from ..state.test_state_of_layers import FlaxQuantised, TorchQuantised
from .sides import FlaxTable, TorchTable, trained


@pytest.mark.parametrize("options", [{}, {"dtype": "float64", "seed": 1}], ids=["held", "float64-drawn"])
def test_a_table_in_a_buffer_is_carried_to_a_training(options):
    report = trained(TorchTable(), FlaxTable(), **options)
    assert report.verdict == "equal", report.first_difference
    assert "state that is carried from torch to Flax: table" in report.notes
    assert "statistic table" in {one.name for one in report.tensors}


def test_a_wrong_use_of_a_carried_table_is_seen_in_training():
    report = trained(TorchTable(), FlaxTable(gain=1.01), steps=1)
    assert (report.verdict, report.first_difference.tensor) == ("different", "loss")


def test_whole_numbers_of_a_quantised_layer_are_carried_to_a_training():
    assert trained(TorchQuantised(), FlaxQuantised(), steps=1).verdict == "equal"


def test_a_frozen_table_is_carried_to_a_training():
    report = trained(TorchTable(frozen=True), FlaxTable())
    assert report.verdict == "equal", report.first_difference
    assert "frozen in torch, so every sample keeps the given numbers: table" in report.notes


@pytest.mark.parametrize("frozen", [False, True], ids=["buffer", "frozen"])
def test_a_table_that_one_side_trains_is_different_and_named(frozen):
    report = trained(TorchTable(frozen=frozen), FlaxTable(nnx.Param), steps=1)
    assert report.verdict == "different"
    found = report.first_difference
    assert (found.step, found.tensor, found.message) == (1, "grad table", "Flax trains it and torch does not")


def test_unused_parameters_are_set_aside_in_training():
    report = trained(TorchTable(idle=True), FlaxTable())
    assert report.verdict == "equal", report.first_difference
    assert "pooler.weight, pooler.bias of torch are left out: no effect on the outputs" in report.notes


class TorchAverage(nn.Module):
    """The running average of the inputs is taken off."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 6)
        self.register_buffer("average", torch.linspace(-1.0, 1.0, 8) ** 2)

    def forward(self, x):
        if self.training:
            self.average.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.fc(x - self.average)


class FlaxAverage(nnx.Module):
    def __init__(self, rate=0.1, kind=nnx.Variable):
        self.fc, self.average = nnx.Linear(8, 6, rngs=nnx.Rngs(0)), kind(jnp.zeros(8))
        self.rate, self.deterministic = rate, False

    def __call__(self, x):
        if not self.deterministic:
            self.average[...] += self.rate * (x.mean((0, 1)) - self.average[...])
        return self.fc(x - self.average[...])


def test_state_that_training_changes_alike_is_equal():
    report = trained(TorchAverage(), FlaxAverage())
    assert report.verdict == "equal", report.first_difference


def test_state_that_training_changes_otherwise_is_different():
    report = trained(TorchAverage(), FlaxAverage(0.11), steps=2)
    assert report.verdict == "different"
    assert report.first_difference.tensor in ("loss", "statistic average")
