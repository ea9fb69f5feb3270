"""A refusal prints the smallest set of rules that settles it, and they do settle it."""

from __future__ import annotations

import operator
import re
import tomllib
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


class TorchStages(nn.Module):
    """Layers with a gain each that the other side does not have."""

    def __init__(self, depth=3, gains=(0, 1, 2)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        for at in gains:
            self.layers[at].gain = nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * getattr(layer, "gain", torch.ones(5)).sum()
        return x


class FlaxStages(nnx.Module):
    def __init__(self, depth=3, extra=False):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(depth)])
        if extra:
            self.shift = nnx.Param(jnp.ones((2, 2)))
        self._extra = extra

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x + self.shift.sum() if self._extra else x


def refusal(*sides):
    with pytest.raises(ValueError, match="rules that would settle it") as caught:
        compare(*sides, X, seeds=1)
    text = str(caught.value)
    return re.search(r"rule = \[.*\]", text)[0]


def test_leftovers_of_all_layers_are_one_rule():
    assert refusal(TorchStages(), FlaxStages()) == 'rule = [{first = "layers.{i}.gain", drop = "REASON"}]'


def test_a_rule_covers_nothing_else():
    assert refusal(TorchStages(gains=(1,)), FlaxStages()) == 'rule = [{first = "layers.1.gain", drop = "REASON"}]'


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("gains", [(0, 1, 2), (2,)])
def test_printed_rules_settle_a_refusal(extra, gains, tmp_path):
    sides = TorchStages(gains=gains), FlaxStages(extra=extra)
    line = refusal(*sides)
    assert compare(*sides, X, seeds=1, rules=tomllib.loads(line)["rule"]).verdict == "different"
    (tmp_path / "rules.toml").write_text(line)
    assert compare(*sides, X, seeds=1, rules=tmp_path / "rules.toml").verdict == "different"


def test_a_missing_layer_is_dropped_by_rules():
    sides = TorchStages(depth=4, gains=()), FlaxStages(depth=3)
    rules = tomllib.loads(refusal(*sides))["rule"]
    assert {rule["first"] for rule in rules} == {"layers.3.bias", "layers.3.weight"}
    assert compare(*sides, X, seeds=1, rules=rules).verdict == "different"


class TorchBuffers(nn.Module):
    """Two buffers of one shape, of which names do not say which is the other side's parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("one", torch.rand(8))
        self.register_buffer("two", torch.rand(8))

    def forward(self, x):
        return torch.tanh(x * self.weight + self.one) * self.two


class FlaxBuffers(nnx.Module):
    def __init__(self):
        self.weight, self.shift = nnx.Param(jnp.ones(8)), nnx.Param(jnp.zeros(8))
        self.other = nnx.Param(jnp.zeros((2, 8)))

    def __call__(self, x):
        return jnp.tanh(x * self.weight[...] + self.shift[...]) * self.other[...].sum(0)


def test_rules_pair_state_that_suits():
    line = refusal(TorchBuffers(), FlaxBuffers())
    assert '{first = "one", second = "shift"}' in line
    assert '{second = "other", drop = "REASON"}' in line
    rules = tomllib.loads(line)["rule"]
    assert compare(TorchBuffers(), FlaxBuffers(), X, seeds=1, rules=rules).verdict == "different"


def parametrised(kind):
    """Return two layers, the first of which computes its weight from a direction and lengths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older of the two
        return nn.Sequential(kind(nn.Linear(8, 5)), nn.Tanh(), nn.Linear(5, 8))


class Plain(nnx.Module):
    def __init__(self):
        self.first, self.second = nnx.Linear(8, 5, rngs=nnx.Rngs(0)), nnx.Linear(5, 8, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (nn.utils.parametrizations.weight_norm, "torch.nn.utils.parametrize.remove_parametrizations"),
        (nn.utils.weight_norm, "torch.nn.utils.remove_weight_norm"),
    ],
)
def test_a_weight_that_is_computed_is_to_be_folded_first(kind, call):
    module = parametrised(kind)
    with pytest.raises(ValueError, match=re.escape(f"so fold it first: {call}(module.0, 'weight')")) as caught:
        compare(module, Plain(), X, seeds=1)
    assert "rule = [" not in str(caught.value)
    operator.attrgetter(call.removeprefix("torch."))(torch)(module[0], "weight")
    assert compare(module, Plain(), X, seeds=1).verdict == "equal"
