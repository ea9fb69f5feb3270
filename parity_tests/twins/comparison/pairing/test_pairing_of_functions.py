"""Weights of pure functions: names and kinds narrow, runs settle, and a fault does not become a refusal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from attn_bridge.parity import compare, function
from attn_parity.sides.subject import Arguments, load_adapter

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((2, 3, 6, 6)).astype(np.float32)
ROWS = RANDOM.standard_normal((3, 6)).astype(np.float32)
NORM_NAMES = {
    "flax": ("scale", "bias", "mean", "var"),
    "keras": ("gamma", "beta", "moving_mean", "moving_variance"),
    "haiku": ("scale", "offset", "mean", "var"),
}


def draw(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape).astype(np.float32))


class Convolutions(nn.Module):
    """A layout is open by shape alone: every kernel axis is 3 or 1."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.depthwise = nn.Conv2d(3, 6, 3, padding=1, groups=3)

    def forward(self, x):
        return self.depthwise(torch.relu(self.bn(self.conv(x))))


def convolve(x, kernel, groups=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups)


def convolutions(style, fault):
    names = NORM_NAMES[style]
    kernel = (3, 3, 3, 2) if style == "keras" else (3, 3, 1, 6)
    weights = {
        "conv/kernel": draw(3, 3, 3, 3),
        **{f"bn/{name}": jnp.abs(draw(3)) + 0.5 for name in names},
        "depthwise/kernel": draw(*kernel),
        "depthwise/bias": draw(6),
    }

    def call(weights, x):
        scale, bias, mean, variance = (weights[f"bn/{name}"] for name in names)
        x = convolve(x.transpose(0, 2, 3, 1), jnp.swapaxes(weights["conv/kernel"], 0, 1 if fault == "turned" else 0))
        x = (x - mean) * jax.lax.rsqrt(variance + (1e-3 if fault == "eps" else 1e-5)) * scale + bias
        x = x if fault == "activation" else jax.nn.relu(x)
        x = convolve(x, weights["depthwise/kernel"].reshape(3, 3, 1, 6), 3) + weights["depthwise/bias"]
        return x.transpose(0, 3, 1, 2)

    return function(call, weights)


CASES = [*((style, "") for style in NORM_NAMES), *(("flax", fault) for fault in ("eps", "activation", "turned"))]


@pytest.mark.parametrize(("style", "fault"), CASES)
def test_convolutions_and_norms_of_a_function_are_paired(style, fault):
    report = compare(Convolutions().eval(), convolutions(style, fault), IMAGES, seeds=1)
    assert report.verdict == ("different" if fault else "equal")
    found = {one.first: one.second for one in report.pairing if one.first.startswith("bn")}
    words = ("weight", "bias", "running_mean", "running_var")
    assert found == {f"bn.{word}": f"bn/{name}" for word, name in zip(words, NORM_NAMES[style], strict=True)}


LETTERS = "mrstuxyz"
"""Names of layers that say nothing, in another order than the layers run."""


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_many_meaningless_names_are_paired_by_use(factor):
    weights = {name: {"w": draw(6, 6), "b": draw(6)} for name in LETTERS}

    def call(weights, x):
        for name in LETTERS[::-1]:
            x = jnp.tanh(x @ weights[name]["w"] + weights[name]["b"])
        return factor * x

    layers = [layer for _ in LETTERS for layer in (nn.Linear(6, 6), nn.Tanh())]
    report = compare(nn.Sequential(*layers), function(call, weights), ROWS, seeds=1)
    assert report.verdict == ("equal" if factor == 1.0 else "different")
    assert [one.second for one in report.pairing if one.first.endswith("weight")] == [f"{n}.w" for n in LETTERS[::-1]]


class Perceptual(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.ModuleList([nn.Conv2d(4 if i else 3, 4, 3, padding=1) for i in range(5)])
        self.heads = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(5)])

    def forward(self, x, y):
        total = 0.0
        for layer, head in zip(self.features, self.heads, strict=True):
            x, y = torch.relu(layer(x)), torch.relu(layer(y))
            total = total + ((x - y) ** 2 * head[:, None, None]).mean((1, 2, 3))
        return total


@pytest.mark.parametrize("fault", ["", "abs", "nothing"])
def test_a_fault_in_a_perceptual_loss_is_not_a_refusal(fault):
    weights = {f"stage_{name}": {"w": draw(3, 3, 4 if i else 3, 4), "b": draw(4), "lin": draw(4)}
               for i, name in enumerate("abcde")}  # fmt: skip

    def call(weights, x, y):
        x, y, total = x.transpose(0, 2, 3, 1), y.transpose(0, 2, 3, 1), 0.0
        for name in "abcde":
            layer = weights[f"stage_{name}"]
            x, y = (jax.nn.relu(convolve(one, layer["w"]) + layer["b"]) for one in (x, y))
            apart = {"": (x - y) ** 2, "abs": jnp.abs(x - y), "nothing": 0.0 * (x - y)}[fault]
            total = total + (apart * layer["lin"]).mean((1, 2, 3))
        return total

    inputs = (IMAGES, RANDOM.standard_normal(IMAGES.shape).astype(np.float32))
    assert compare(Perceptual(), function(call, weights), inputs, seeds=1).verdict == (
        "different" if fault else "equal"
    )


def test_a_loop_that_carries_data_counts_uses():
    stacked = draw(2, 6, 6)

    def call(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights["p"])
        return jnp.sin(x @ weights["a"])

    class Straight(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.then, self.last = (nn.Linear(6, 6, bias=False) for _ in range(3))

        def forward(self, x):
            return torch.sin(self.last(torch.tanh(self.then(torch.tanh(self.first(x))))))

    subject = load_adapter("flax").subject_of(function(call, {"a": draw(6, 6), "p": stacked}))
    uses = subject.uses(subject.weights(), Arguments((ROWS,)))
    assert uses["p"] < uses["a"]
    ours = load_adapter("torch").subject_of(Straight())
    found = ours.uses(ours.weights(), Arguments((ROWS,)))
    assert sorted(found, key=found.get) == ["first.weight", "then.weight", "last.weight"]
