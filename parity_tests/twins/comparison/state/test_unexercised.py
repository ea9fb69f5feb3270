"""Parameters and arguments that a comparison does not reach, and parameters without influence."""

from __future__ import annotations

import jax
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare
from attn_parity.results.findings import shown

from ..compare.sides import X, jnp_or_torch, judge


def with_extra(m, x):
    return x * m.w + 0.0 * m.extra


def ignoring(m, x):
    return x * m.w


TWO = {"w": (8,), "extra": (8,)}


def test_a_parameter_that_neither_side_uses_is_unexercised():
    report = judge(ignoring, shapes=TWO)
    assert (report.verdict, report.unexercised, report.invariances) == ("equal", ["extra"], [])


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_parameter_that_one_side_ignores_is_a_difference(side):
    sides = {"torch": with_extra, "flax": with_extra} | {side: ignoring}
    report = judge(sides["torch"], sides["flax"], shapes=TWO)
    assert report.verdict == "different"
    assert {one.name: one.message for one in report.failures} == {
        "grad extra": f"the {shown(side)} side has this parameter and does not use it"
    }


def test_a_parameter_whose_nan_the_code_cannot_take_is_reached():
    """An index that counts how many numbers are above a threshold is -1 where none is, as none is of NaN."""

    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.extra = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(1))

        def forward(self, x):
            scores = x * self.scale + self.extra
            ranked = (scores - scores.mean(-1, keepdim=True)).sort(-1, descending=True).values
            last = (ranked >= ranked.mean(-1, keepdim=True)).sum(-1, keepdim=True) - 1
            return ranked - ranked.gather(-1, last)

    class FlaxSorted(nnx.Module):
        def __init__(self):
            self.scale, self.extra = nnx.Param(jax.numpy.ones(8)), nnx.Param(jax.numpy.ones(1))

        def __call__(self, x):
            scores = x * self.scale + self.extra
            ranked = -jax.numpy.sort(jax.numpy.mean(scores, -1, keepdims=True) - scores, -1)
            last = (ranked >= ranked.mean(-1, keepdims=True)).sum(-1, keepdims=True) - 1
            return ranked - jax.numpy.take_along_axis(ranked, last, -1)

    report = compare(Sorted(), FlaxSorted(), X, seeds=1)
    assert (report.verdict, report.invariances, report.unexercised) == ("equal", ["extra"], [])
    assert [note for note in report.notes if "float64" in note] == []


@pytest.mark.parametrize("shapes", [((), (1,)), ((1,), ())])
def test_a_scalar_is_paired_with_an_array_of_one(shapes):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full(shapes[0], 1.5))

        def forward(self, x):
            return torch.sin(x * self.scale)

    class FlaxScaled(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jax.numpy.full(shapes[1], 0.7))

        def __call__(self, x):
            return jax.numpy.sin(x * self.scale)

    assert compare(Scaled(), FlaxScaled(), X, seeds=1).verdict == "equal"


def test_outputs_that_are_always_zero_leave_no_weight_unreached():
    def padded(m, x):
        product = x @ m.w
        return jnp_or_torch(x).concatenate([product, 0 * product], 1)

    report = judge(padded, shapes={"w": (8, 4)})
    assert report.verdict == "equal"
    assert [line for line in report.unreached if "no gradient reached" in line] == []


def test_a_parameter_without_influence_is_an_invariance():
    def shifted(m, x):
        library = jnp_or_torch(x)
        softmax = torch.softmax if library is torch else jax.nn.softmax
        return softmax(x * m.w + m.extra, -1)

    report = judge(shifted, shapes={"w": (8,), "extra": (1,)})
    assert (report.verdict, report.invariances, report.unexercised) == ("equal", ["extra"], [])


@pytest.mark.parametrize("swallowing", ["torch", "flax"])
def test_a_side_that_swallows_nan_does_not_ignore_a_parameter(swallowing):
    """Fused attention gives zeros where all scores are NaN: that a key bias is read does not show as NaN there."""

    def shifted(m, x):
        library = jnp_or_torch(x)
        softmax = torch.softmax if library is torch else jax.nn.softmax
        weights = softmax(x * m.w + m.extra, -1)
        return library.nan_to_num(weights) if swallowing == ("torch" if library is torch else "flax") else weights

    report = judge(shifted, shapes={"w": (8,), "extra": (1,)})
    assert (report.verdict, report.invariances, report.unexercised) == ("equal", ["extra"], [])


def test_a_gradient_stopped_on_both_sides_is_noted():
    def ours(m, x):
        return x * m.w + m.extra.detach()

    report = judge(ours, lambda m, x: x * m.w + jax.lax.stop_gradient(m.extra[...]), shapes=TWO)
    assert report.verdict == "equal"
    assert "extra: the output depends on it, but its gradient is zero on both sides" in report.notes


def test_unreached_arguments_and_dropout_are_listed():
    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.25)

        def forward(self, x, mask=None):
            return self.drop(self.fc(x))

    class Theirs(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.fc, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)

        def __call__(self, x, positions=None):
            return self.drop(self.fc(x))

    report = compare(Ours(), Theirs(), X, seeds=1)
    assert report.verdict == "equal"
    assert report.unreached == [
        "dropout of drop (0.25): off in eval mode",
        "the torch module's `mask` (you gave none)",
        "dropout of drop (0.25): off in eval mode",
        "the Flax module's `positions` (you gave none)",
    ]
