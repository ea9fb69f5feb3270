"""Torch buffers that hold data are carried to state and parameters of every kind on the other side."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge.parity import compare, function

from ..compare.sides import X, verdicts

random = np.random.default_rng(5)
KERNEL = random.normal(size=(6, 8)).astype(np.float32)
BIAS = random.normal(size=6).astype(np.float32)


class TorchRouter(nn.Module):
    """Sigmoid scores; the largest three with a bias that is no parameter are kept, as in DeepSeek's router."""

    def __init__(self, *, persistent=True):
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(KERNEL))
        self.register_buffer("e_score_correction_bias", torch.from_numpy(BIAS), persistent=persistent)

    def forward(self, x):
        scores = torch.sigmoid(x @ self.weight.T)
        kept = torch.topk(scores + self.e_score_correction_bias, 3, -1).indices
        return scores * torch.zeros_like(scores).scatter(-1, kept, 1.0)


def routed(x, kernel, bias, weighed=0.0):
    scores = 1.0 / (1.0 + jnp.exp(-(x @ kernel)))
    biased = scores + bias
    least = jnp.sort(biased, -1)[..., 3:4]
    return jnp.where(biased >= least, scores + weighed * bias, 0.0)


class FlaxRouter(nnx.Module):
    def __init__(self, kind=nnx.Variable, name="bias", weighed=0.0, numbers=None):
        self.kernel = nnx.Param(jnp.zeros((8, 6)))
        setattr(self, name, kind(jnp.zeros(6) if numbers is None else jnp.asarray(numbers)))
        self._name, self._weighed = name, weighed

    def __call__(self, x):
        return routed(x, self.kernel[...], getattr(self, self._name)[...], self._weighed)


class Statistic(nnx.Variable):
    """A kind of state that a user defines."""


class LinenRouter(linen.Module):
    @linen.compact
    def __call__(self, x):
        kernel = self.param("kernel", lambda _: jnp.zeros((8, 6)))
        bias = self.variable("router_state", "e_score_correction_bias", lambda: jnp.zeros(6))
        return routed(x, kernel, bias.value)


def linen_side():
    state = {"e_score_correction_bias": jnp.zeros(6)}
    return LinenRouter(), {"params": {"kernel": jnp.zeros((8, 6))}, "router_state": state}


def function_side(name="e_score_correction_bias"):
    return function(lambda w, x: routed(x, w["kernel"], w[name]), {"kernel": jnp.zeros((8, 6)), name: jnp.zeros(6)})


KINDS = [nnx.Variable, nnx.Cache, nnx.BatchStat, nnx.Param, Statistic]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["e_score_correction_bias", "shift"])
def test_a_buffer_with_data_is_carried(kind, name):
    report = compare(TorchRouter(), FlaxRouter(kind, name), X, seeds=1)
    assert report.verdict == "equal"
    assert ("e_score_correction_bias", name) in {(row.first, row.second) for row in report.pairing}


@pytest.mark.parametrize("side", [linen_side, function_side, lambda: function_side("shift")])
def test_a_buffer_is_carried_to_collections_and_trees(side):
    report = compare(TorchRouter(), side(), X, seeds=1)
    assert report.verdict == "equal"
    assert len(report.pairing) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_the_use_of_carried_state_is_seen(kind):
    assert compare(TorchRouter(), FlaxRouter(kind, weighed=0.01), X, seeds=1).verdict == "different"


def test_state_is_carried_from_flax_to_torch():
    first = FlaxRouter(nnx.Variable, "e_score_correction_bias", numbers=BIAS)
    report = compare(first, TorchRouter(), X, seeds=1)
    assert report.verdict == "equal"


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Param])
def test_sides_keep_their_own_state_without_transfer(kind):
    right, wrong = FlaxRouter(kind, numbers=BIAS), FlaxRouter(kind, numbers=2 * BIAS)
    for one in (right, wrong):
        one.kernel.set_value(jnp.asarray(KERNEL.T))
    assert compare(TorchRouter(), right, X, seeds=1, transfer=False).verdict == "equal"
    assert compare(TorchRouter(), wrong, X, seeds=1, transfer=False).verdict == "different"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transfer", [True, False])
def test_a_rule_reaches_state(kind, transfer):
    second = FlaxRouter(kind, "shift", numbers=BIAS)
    second.kernel.set_value(jnp.asarray(KERNEL.T))
    rule = [{"first": "e_score_correction_bias", "second": "shift"}]
    report = compare(TorchRouter(persistent=False), second, X, rules=rule, seeds=1, transfer=transfer)
    assert report.verdict == "equal"
    assert {row.how for row in report.pairing if row.second == "shift"} == {"rule"}


def test_a_parameter_paired_with_state_is_drawn_and_named():
    report = compare(TorchRouter(), FlaxRouter(nnx.Param), X, seeds=1)
    assert "state in torch and weights on the other side, so that no gradient is compared: e_score_correction_bias" in (
        report.notes
    )
    assert "grad e_score_correction_bias" not in verdicts(report)


def test_state_that_is_not_carried_is_named():
    first, second = nn.Linear(8, 4), nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    first.register_buffer("calls", torch.zeros(3))
    second.cache = nnx.Cache(jnp.zeros(2))
    report = compare(first, second, X, seeds=1)
    assert report.verdict == "equal"
    assert "state that is not carried, so that torch keeps its own: calls" in report.notes
    assert "state that is not carried, so that Flax keeps its own: cache" in report.notes


def test_running_statistics_of_other_names_are_carried():
    class Torch(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("spread", torch.tensor([0.5, 2.0, 3.0, 0.7, 1.0, 1.5, 0.2, 4.0]))

        def forward(self, x):
            return x / torch.sqrt(self.spread)

    class Flax(nnx.Module):
        def __init__(self):
            self.var = nnx.BatchStat(jnp.ones(8))

        def __call__(self, x):
            return x / jnp.sqrt(self.var[...])

    assert compare(Torch(), Flax(), X, seeds=1).verdict == "equal"


class TorchNormaliser(nn.Module):
    """Observations by a running mean and variance, in buffers that are no BatchNorm's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(random.normal(size=8)).float())
        self.register_buffer("var", torch.from_numpy(random.uniform(0.5, 2.0, size=8)).float())

    def forward(self, x):
        return (x - self.mean) / torch.sqrt(self.var + 1e-8)


def normaliser(power=-0.5):
    def normalised(weights, x):
        state = weights["state"]
        return (x - state["mean"]) * (state["var"] + 1e-8) ** power

    return function(normalised, {"state": {"mean": jnp.zeros(8), "var": jnp.ones(8)}})


@pytest.mark.parametrize("power", [-0.5, -1.0], ids=["right", "without-root"])
@pytest.mark.parametrize("turned", [False, True], ids=["torch-first", "torch-second"])
def test_a_running_variance_in_buffers_is_carried(power, turned):
    sides = (normaliser(power), TorchNormaliser()) if turned else (TorchNormaliser(), normaliser(power))
    assert compare(*sides, X, seeds=1).verdict == ("equal" if power == -0.5 else "different")


class TorchMemory(nn.Module):
    """Adds the mean of former calls, and keeps that of this one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("memory", torch.from_numpy(random.normal(size=8).astype(np.float32)))

    def forward(self, x):
        y = self.fc(x) + self.memory
        with torch.no_grad():
            self.memory.copy_(y.reshape(-1, 8).mean(0))
        return y


class FlaxMemory(nnx.Module):
    def __init__(self, writes):
        self.fc, self.memory = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Cache(jnp.zeros(8))
        self._writes = writes

    def __call__(self, x):
        y = self.fc(x) + self.memory[...]
        if self._writes:
            self.memory[...] = y.reshape(-1, 8).mean(0)
        return y


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_state_that_one_side_alone_changes_is_not_covered(is_first, writes):
    pair = [TorchMemory(), FlaxMemory(writes)]
    report = compare(*pair[:: 1 if is_first else -1], X, seeds=1)
    texts = [text for text in report.unreached if text.startswith("state after a call")]
    assert report.verdict == "equal"
    assert texts == ([] if writes else ["state after a call: memory, which torch alone changes"])
    assert not texts or report.unreached[0] == texts[0]
    assert "a second call: what a call changes is put back before each and not compared (memory)" in report.unreached
