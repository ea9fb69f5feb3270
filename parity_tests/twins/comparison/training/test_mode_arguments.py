"""Arguments of Flax calls that name the mode: `compare` sets those that the user left out, and says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge import parity
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
RATE = 0.3


class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(RATE)

    def forward(self, x):
        return self.drop(self.norm(self.fc(x)))


class ByTrain(linen.Module):
    """A port whose call takes the mode as Flax teaches."""

    epsilon: float = 1e-5
    momentum: float = 0.9

    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.Dense(4, name="fc")(x)
        average = not train
        x = linen.BatchNorm(use_running_average=average, momentum=self.momentum, epsilon=self.epsilon, name="norm")(x)
        return linen.Dropout(RATE)(x, deterministic=not train)


class ByDeterministic(ByTrain):
    @linen.compact
    def __call__(self, x, *, deterministic: bool = True):
        return ByTrain.__call__(self, x, not deterministic)


class TrainedByDefault(ByTrain):
    @linen.compact
    def __call__(self, x, is_training: bool = True):
        return ByTrain.__call__(self, x, is_training)


class NNXNet(nnx.Module):
    """An NNX module whose call decides, and not its own mode."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(5, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.drop = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x, training: bool = False):
        x = self.norm(self.fc(x), use_running_average=not training)
        return self.drop(x, deterministic=not training)


def linen_side(module):
    return module, module.init({"params": jax.random.key(0)}, jnp.asarray(X), **_eval(module))


def _eval(module):
    return {"is_training": False} if isinstance(module, TrainedByDefault) else {}


def compare(theirs, given=None, **options):
    torch.manual_seed(0)
    theirs = linen_side(theirs) if isinstance(theirs, linen.Module) else theirs
    return parity.compare(TorchNet(), theirs, X, given, seeds=1, **options)


@pytest.mark.parametrize(
    ("module", "note"),
    [
        (ByTrain(), "train mode: Flax is called with train=True, which is False by default"),
        (ByDeterministic(), "train mode: Flax is called with deterministic=False, which is True by default"),
        (NNXNet(), "train mode: Flax is called with training=True, which is False by default"),
    ],
)
def test_train_mode_sets_the_argument_of_the_mode(module, note):
    report = compare(module, train=True)
    assert report.verdict == "equal", report.explain()
    assert note in report.notes
    trains = "; parity.train does that" if isinstance(module, nnx.Module) else ""  # it takes no Linen side
    assert f"running statistics that train mode changes are not compared{trains}" in report.notes
    assert "train mode: both sides drop by the same masks, 1 per call" in report.notes


@pytest.mark.parametrize("given", [(X, True), {"x": X, "train": np.bool_(True)}])
def test_a_given_mode_stays_as_given(given):
    report = compare(ByTrain(), given, train=True)
    assert report.verdict == "equal", report.explain()
    assert not any("is called with" in note for note in report.notes)


def test_a_mode_given_against_train_mode_is_different():
    report = compare(ByTrain(), {"x": X, "train": False}, train=True)
    assert report.verdict == "different"
    assert report.tensors[0].message == "torch draws a mask of (6, 4) at rate 0.3, Flax none"
    assert (
        "train mode: the sides drop by masks that are not all the same, 1 per call in torch and 0 in Flax"
        in report.notes
    )
    assert not any("by the same masks" in note for note in report.notes)


def test_eval_mode_leaves_a_default_that_agrees():
    report = compare(ByTrain())
    assert report.verdict == "equal", report.explain()
    assert not any("is called with" in note for note in report.notes)


def test_eval_mode_sets_a_default_that_contradicts_it():
    report = compare(TrainedByDefault())
    assert report.verdict == "equal", report.explain()
    assert "eval mode: Flax is called with is_training=False, which is True by default" in report.notes
    assert compare(TrainedByDefault(), train=True).verdict == "equal"


def test_a_fault_in_train_mode_is_found_in_its_norm():
    report = compare(ByTrain(epsilon=1e-2), train=True)
    assert report.verdict == "different"
    assert report.first_divergence.path == "norm"
    assert report.first_divergence.hint.startswith("eps is 1e-05 in torch and 0.01 in Flax")


def test_a_dump_is_in_eval_mode_whatever_the_default_is(tmp_path):
    torch.manual_seed(0)
    dump(TorchNet(), X, tmp_path / "first", seeds=1)
    dump(linen_side(TrainedByDefault()), None, tmp_path / "second", like=tmp_path / "first")
    assert compare_dumps(tmp_path / "first", tmp_path / "second").verdict == "equal"
