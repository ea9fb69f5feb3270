"""Outputs of any structure; values that are integers, NaN or random."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import ParityError
from attn_parity.results.findings import shown

from ..compare.sides import X, judge, scale, verdicts


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (lambda m, x: (x * m.w, x), scale, r"torch returns 2 \(\[0\] .*\), Flax returns 1 \(an array \(2, 5, 8\)\)"),
        (scale, lambda m, x: (x * m.w, x), r"torch returns 1 .*, Flax returns 2"),
        (lambda m, x: {"a": x * m.w}, lambda m, x: {"b": x * m.w}, r"torch returns 1 \(\['a'\].* Flax .* \(\['b'\]"),
        (scale, lambda m, x: (x * m.w).swapaxes(0, 1), r"output is \(2, 5, 8\) in torch and \(5, 2, 8\) in Flax"),
        (scale, lambda m, x: (x * m.w)[:, :1], r"output is \(2, 5, 8\) in torch and \(2, 1, 8\) in Flax"),
        (lambda m, x: None, scale, "the torch module TorchSide returned NoneType, which holds no tensor"),
        (scale, lambda m, x: {}, "the Flax module FlaxSide returned dict, which holds no array"),
    ],
)
def test_outputs_of_another_structure_or_shape_are_refused(ours, theirs, message):
    with pytest.raises(ValueError, match=message) as caught:
        judge(ours, theirs)
    assert "\n" not in str(caught.value)


def test_nested_outputs_are_compared_per_array():
    def both(m, x):
        return {"a": x * m.w, "b": (x + 1, None)}

    report = judge(both)
    assert report.verdict == "equal"
    assert {"output['a']", "output['b'][0]"} <= verdicts(report).keys()
    report = judge(both, lambda m, x: {"a": x * m.w, "b": (x + 1.001, None)})
    assert {one.name for one in report.failures} == {"output['b'][0]"}


@pytest.mark.parametrize(("count", "names"), [(1, {"output"}), (2, {"output[0]", "output[1]"})])
def test_several_outputs_are_named_by_position(count, names):
    report = judge(lambda m, x: (x * m.w,) * count if count > 1 else x * m.w)
    assert {name for name in verdicts(report) if name.startswith("output")} == names


def test_integers_are_compared_exactly():
    def best(m, x):
        return x * m.w, (x * m.w).argmax(-1), x * m.w > 0

    assert judge(best).verdict == "equal"
    report = judge(best, lambda m, x: (x * m.w, (x * m.w).argmax(-1).at[0, 0].add(1), x * m.w > 0))
    assert verdicts(report) == {
        "output[0]": "equal",
        "output[1]": "different",
        "output[2]": "equal",
        "grad inputs[0]": "equal",
        "grad w": "equal",
    }
    assert "output[1]: different: 1 of 10 elements are not the same" in report.explain()


def test_an_output_without_floats_can_differ():
    report = judge(lambda m, x: (x * m.w).argmax(-1), lambda m, x: (x * m.w).argmin(-1))
    assert (report.verdict, report.unexercised) == ("different", [])
    assert "w: the output depends on it, but its gradient is zero on both sides" in report.notes


def test_whole_numbers_that_alone_differ_have_a_place_and_values():
    """They do so in drawn samples, and not in the given input."""
    report = judge(
        lambda m, x: (x * m.w).argmax(-1),
        lambda m, x: (x * m.w).argmax(-1).at[0, 0].add(jnp.where(abs(x[0, 0, 0] - X[0, 0, 0]) > 1e-6, 1, 0)),
    )
    (tensor,) = (one for one in report.tensors if one.name == "output")
    assert tensor.worst.second - tensor.worst.first == 1
    assert tensor.worst.index == (0, 0)
    assert "seed" in tensor.sample
    assert (report.first_divergence.path, report.first_divergence.direction) == ("", "forward")


def where(x):
    return torch.where if isinstance(x, torch.Tensor) else jnp.where


def holes(value):
    return lambda m, x: where(x)(x > 1, value, x * m.w)


def test_nan_at_the_same_places_is_equal():
    report = judge(holes(math.nan))
    assert report.verdict == "equal"
    assert judge(holes(math.nan), lambda m, x: holes(math.nan)(m, x) * 1.001).verdict == "different"


@pytest.mark.parametrize(
    ("ours", "theirs"), [(0.0, math.nan), (math.nan, 0.0), (math.inf, -math.inf), (math.inf, math.nan), (1.0, math.inf)]
)
def test_values_nonfinite_on_one_side_are_different(ours, theirs):
    report = judge(holes(ours), holes(theirs))
    assert report.verdict == "different"
    assert report.tensors[0].verdict == "different"
    assert "elements are finite on one side only" in report.tensors[0].message
    assert json.dumps(report.to_json(), allow_nan=False)


def test_nothing_finite_is_inconclusive():
    report = judge(lambda m, x: x * m.w * math.nan)
    assert report.verdict == "inconclusive"
    assert "no element is finite on both sides, so nothing was compared" in report.message
    with pytest.raises(ParityError, match="inconclusive"):
        report.raise_for_mismatch()


def flax_noise():
    class Noise(nnx.Module):
        def __init__(self):
            self.w, self.rngs = nnx.Param(jnp.ones(8)), nnx.Rngs(0)

        def __call__(self, x):
            return x * self.w + jax.random.normal(self.rngs.noise(), x.shape)

    return Noise()


def flax_dropout():
    class Dropout(nnx.Module):
        def __init__(self):
            self.w, self.drop = nnx.Param(jnp.ones(8)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.drop(x * self.w, deterministic=False)

    return Dropout()


@pytest.mark.parametrize(
    ("side", "ours", "theirs"),
    [
        ("torch", lambda m, x: x * m.w + torch.randn_like(x), scale),
        ("torch", lambda m, x: nn.functional.dropout(x * m.w), scale),
        ("torch", lambda m, x: x * m.w * float(np.random.rand()), scale),
        ("flax", scale, flax_noise),
        ("flax", scale, flax_dropout),
        ("flax", scale, lambda m, x: x * m.w * float(np.random.rand())),
    ],
    ids=["torch-noise", "torch-dropout", "torch-numpy", "flax-noise", "flax-dropout", "flax-numpy"],
)
def test_a_module_that_is_not_deterministic_is_inconclusive(side, ours, theirs):
    report = judge(ours, theirs() if theirs in (flax_noise, flax_dropout) else theirs)
    assert report.verdict == "inconclusive"
    assert (
        f"the {shown(side)} module is not deterministic: the same input gave results that differ by " in report.message
    )
    assert report.tensors == []
