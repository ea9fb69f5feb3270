"""The forms of inputs that `compare` takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn_bridge.parity import compare

from .sides import IDS, FlaxSide, TorchSide, X, judge, linear, scale, verdicts

TORCH_X = torch.from_numpy(X)
FORMS = {
    "array": X,
    "tuple": (X,),
    "list": [X],
    "dict": {"x": X},
    "torch tensor": TORCH_X,
    "torch tensor that requires gradients": TORCH_X.clone().requires_grad_(),
    "tuple of a torch tensor": (TORCH_X,),
    "jax array": jnp.asarray(X),
    "dict of a jax array": {"x": jnp.asarray(X)},
    "float64": X.astype(np.float64),
    "not contiguous": np.ascontiguousarray(X.swapaxes(0, 2)).swapaxes(0, 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_inputs_may_be_given_in_any_form(form):
    def named(m, x):
        return x * m.w

    sides = TorchSide(named, w=(8,)), FlaxSide(named, w=(8,))
    sides[0].forward = lambda x: sides[0].function(sides[0], x)
    report = compare(*sides, FORMS[form], seeds=1)
    assert report.verdict == "equal", str(report)
    assert verdicts(report).keys() == {"output", "grad x", "grad w"}
    picture = next(one for one in report.pictures if one.name == "output")
    assert np.array_equal(picture.torch, X * sides[0].w.detach().numpy()), "the first sample is the given numbers"


def test_bfloat16_tensors_and_nested_inputs_are_taken():
    def mix(m, parts, factor):
        return (parts["a"][0] + parts["b"]) * m.w * factor

    inputs = ({"a": [TORCH_X.bfloat16()], "b": X + 1}, 2.5)
    report = judge(mix, inputs=inputs)
    assert report.verdict == "equal"
    assert {"grad inputs[0]['a'][0]", "grad inputs[0]['b']"} <= verdicts(report).keys()
    wrong = judge(mix, lambda m, p, f: (p["a"][0] + p["b"] * 1.0001) * m.w * f, inputs=inputs)
    assert wrong.verdict == "different"


def test_arrays_without_axes_are_inputs_and_parameters_like_others():
    def heat(m, x, t):
        return x * m.t * t

    shapes = {"t": ()}
    report = judge(heat, inputs=(X, np.float32(2.5)), shapes=shapes)
    assert report.verdict == "equal"
    wrong = judge(heat, lambda m, x, t: x * m.t * t * 1.0001, inputs=(X, np.float32(2.5)), shapes=shapes)
    assert wrong.verdict == "different"
    assert {one.name: one.shape for one in wrong.failures}["grad t"] == ()


def test_keywords_are_matched_by_name_in_any_order():
    def add(m, x, y):
        return x * m.w - y

    assert judge(add, inputs={"y": X + 1, "x": X}).verdict == "equal"


def test_the_flax_side_may_be_called_in_another_way():
    def flax_call(m, hidden, deterministic):
        return hidden["h"] * m.w

    report = judge(scale, flax_call, flax_inputs={"hidden": {"h": X}, "deterministic": True})
    assert report.verdict == "equal"
    assert report.tensors[1].flax_name == "grad hidden['h']"


def test_masks_and_ids_are_inputs_without_gradients():
    mask = X > 0

    def masked(m, x, keep):
        where = torch.where if isinstance(x, torch.Tensor) else jnp.where
        return where(keep, x * m.w, 0.0)

    report = judge(masked, inputs=(X, mask))
    assert report.verdict == "equal"
    assert verdicts(report).keys() == {"output", "grad inputs[0]", "grad w"}
    report = judge(lambda m, ids: m.w[ids], inputs=IDS, shapes={"w": (11, 4)})
    assert report.verdict == "equal"
    assert verdicts(report).keys() == {"output", "grad w"}


def test_modules_left_on_the_cpu_by_name_are_compared():
    assert compare(*linear(), X, seeds=1, device="cpu").verdict == "equal"
    assert compare(*linear(), X, seeds=1, device=("cpu", "cpu")).verdict == "equal"
