"""Inputs and outputs of both sides are matched by name, position and value."""

from __future__ import annotations

import dataclasses
import typing

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

from ..compare.sides import IDS, X, judge, scale, verdicts


class TorchNamesake(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x, weight):
        return x * self.weight + 2 * weight.detach()


class FlaxNamesake(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(8))

    def __call__(self, x, weight):
        return x * self.weight + 2 * weight


def test_an_input_named_like_a_parameter_is_judged():
    report = compare(TorchNamesake(), FlaxNamesake(), (X, X + 1), seeds=1)
    assert report.verdict == "different"
    assert verdicts(report) == {
        "output": "equal",
        "grad x": "equal",
        "grad weight (input)": "different",
        "grad weight": "equal",
    }
    assert {one.name: one.flax_name for one in report.tensors}["grad weight (input)"] == "grad weight (input)"


def test_sides_of_two_precisions_get_the_same_inputs():
    theirs = nnx.Linear(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    report = compare(nn.Linear(8, 4), theirs, X, seeds=1)
    assert (report.verdict, {one.side for one in report.failures}) == ("precision", {"flax"})


def turned(m, x):
    return (x * m.w).swapaxes(0, 1)


REARRANGED = {
    "transposed": (turned, X.swapaxes(0, 1)),
    "transposed, with an axis more": (turned, X.swapaxes(0, 1)[:, None]),
    "merged axes": (lambda m, x: (x * m.w).reshape(10, 8), X.reshape(10, 8)),
    "in bfloat16": (scale, X.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("form", REARRANGED)
def test_flax_inputs_may_have_another_shape_or_dtype(form):
    ours, flax_inputs = REARRANGED[form]

    def theirs(m, x):
        return (x[:, 0] if x.ndim == 4 else x) * m.w

    report = judge(ours, theirs, flax_inputs=np.ascontiguousarray(flax_inputs))
    assert (report.verdict, report.notes) == ("equal", [])
    assert {one.name: one.shape for one in report.tensors}["grad inputs[0]"] == X.shape
    report = judge(ours, lambda m, x: theirs(m, jnp.where(x > 0, x, 0.999 * x)), flax_inputs=flax_inputs)
    assert set(verdicts(report).values()) == {"different"}


def test_equal_inputs_are_matched_by_name_or_position():
    def minus(m, q, k):
        return q * m.w - k

    assert judge(minus, inputs={"q": X, "k": X}, flax_inputs={"k": X, "q": X}).verdict == "equal"


def test_unmatched_inputs_are_not_varied_and_are_named():
    one_hot = np.eye(11, dtype=np.float32)[IDS] * 2

    def looked_up(m, x, ids):
        return x * m.w[ids] * 2

    report = judge(
        looked_up, lambda m, x, rows: x * (rows @ m.w), (X, IDS), flax_inputs=(X, one_hot), shapes={"w": (11, 8)}
    )
    assert report.verdict == "equal"
    assert any("inputs[1] of Flax; taken as given in every sample" in note for note in report.notes)
    wrong = judge(scale, lambda m, x: x * m.w * 0.5, flax_inputs=2.5 * X)
    assert wrong.verdict == "different"
    assert any("inputs[0] of torch, inputs[0] of Flax; taken" in note for note in wrong.notes)
    assert wrong.message == "the inputs hold different numbers: inputs[0] of torch, inputs[0] of Flax"
    assert wrong.message in " ".join(str(wrong).splitlines()[:3])


def test_whole_numbers_that_differ_lead_the_report():
    def looked_up(m, x, ids):
        return x * m.w[ids]

    wrong = judge(looked_up, inputs=(X, IDS), flax_inputs=(X, (IDS + 1) % 11), shapes={"w": (11, 8)})
    assert wrong.message == "the inputs hold different numbers: inputs[1] of torch, inputs[1] of Flax"
    keep = IDS > 4
    masked = judge(
        lambda m, x, k: x * m.w * k[..., None],
        lambda m, x, k: x * m.w * k[..., None],
        (X, keep),
        flax_inputs=(X, ~keep),
    )
    assert (masked.verdict, masked.message) == ("different", "")


def test_the_orientation_of_constant_inputs_is_not_guessed():
    keep = np.ones((2, 5), np.float32)
    report = judge(
        lambda m, x, k: x * m.w * k[..., None],
        lambda m, x, k: x * m.w * k.T[..., None],
        (X, keep),
        flax_inputs=(X, keep.T.copy()),
    )
    assert report.verdict == "equal"
    assert any("input inputs[1] is 1 everywhere: taken for a mask" in note for note in report.notes)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_input_hides_no_fault(value):
    report = compare(nn.LayerNorm(8), nnx.LayerNorm(8, rngs=nnx.Rngs(0)), np.full((2, 8), value), seeds=1)
    assert verdicts(report)["output"] == "different"


def test_keys_are_matched_in_any_order():
    def ours(m, parts):
        return {"a": parts["x"] * m.w, "b": {10: parts["y"], 2: parts["y"] + 1}}

    def theirs(m, parts):
        return {"b": {2: parts["y"] + 1, 10: parts["y"]}, "a": parts["x"] * m.w}

    report = judge(ours, theirs, ({"x": X, "y": X + 1},), flax_inputs=({"y": X + 1, "x": X},))
    assert report.verdict == "equal"
    wrong = judge(ours, lambda m, parts: theirs(m, parts) | {"a": parts["x"] * 2}, ({"x": X, "y": X + 1},))
    assert {one.name for one in wrong.failures} == {"output['a']", "grad inputs[0]['x']", "grad w"}


@dataclasses.dataclass
class Logits:
    logits: typing.Any
    cache: typing.Any = None


ONLY_ONE = {"a dict": lambda y: {"logits": y}, "an object": Logits, "beside a cache": lambda y: Logits(y, object())}


@pytest.mark.parametrize("what", ONLY_ONE)
def test_an_array_matches_a_container_of_one_array(what):
    def wrapped(m, x):
        return ONLY_ONE[what](x * m.w)

    assert judge(wrapped, scale).verdict == "equal"
    wrong = judge(wrapped, lambda m, x: x * m.w * 1.001)
    assert verdicts(wrong) == {"output": "different", "grad inputs[0]": "different", "grad w": "different"}


def test_either_side_may_return_the_container():
    assert judge(scale, lambda m, x: {"logits": x * m.w}).verdict == "equal"


def test_outputs_under_two_names_are_refused():
    with pytest.raises(ValueError, match=r"differ in structure: torch returns 1 \(\['logits'\] .* 1 \(\['hidden'\]"):
        judge(lambda m, x: {"logits": x * m.w}, lambda m, x: {"hidden": x * m.w})


def test_an_output_of_another_kind_is_noted():
    report = judge(lambda m, x: (x * m.w > 0).float(), lambda m, x: x * m.w > 0)
    assert "output is float32 in torch and bool in Flax; only its values are compared" in report.notes


def test_a_few_nans_in_the_inputs_are_noted():
    holed = X.copy()
    holed[0, 0, 0] = np.nan
    report = judge(scale, inputs=holed)
    assert (report.verdict, report.notes) == (
        "equal",
        [
            "input inputs[0]: 1 of 80 elements are NaN; drawn inputs hold none",
            "output: 1 of 80 elements are NaN or infinite on both sides (your weights), and were not compared",
            "grad w: 1 of 8 elements are NaN or infinite on both sides (your weights), and were not compared",
        ],
    )
