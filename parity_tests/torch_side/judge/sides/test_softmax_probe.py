"""Probes of attention: a softmax by its log-sum-exp, and the formula of FlashAttention."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from attn_parity.frameworks.torch.subject import subject_of
from attn_parity.sides.subject import Arguments
from attn_parity.sides.tables import STILL

from .modules import assert_same, everything, run


class FlashByHand(torch.autograd.Function):
    """FlashAttention-2 in float32, its backward pass from the paper; scores are computed again in another order."""

    @staticmethod
    def forward(ctx, query, key, value):
        scores = query @ key.mT * query.shape[-1] ** -0.5
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        output = weights @ value / total
        ctx.save_for_backward(query, key, value, output, top + torch.log(total))
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, logsumexp = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        weights = torch.exp((query * scale) @ key.mT - logsumexp)
        inner = (gradient * output).sum(-1, keepdim=True)
        of_scores = weights * (gradient @ value.mT - inner) * scale
        return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


class Attends(nn.Module):
    def __init__(self, how, **options):
        super().__init__()
        self.how, self.options = how, options

    def forward(self, query, key, value):
        return self.how(query, key, value, **self.options)


def plainly(query, key, value):
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value


def loss(found, wanted):
    """Return the relative rms errors of the gradients."""
    pairs = zip(found.input_gradients, wanted.input_gradients, strict=True)
    return np.array([np.sqrt(np.mean((one - two) ** 2) / np.mean(two**2)) for one, two in pairs])


def draw_attention(time, seed, scale, width=32):
    draw = np.random.default_rng(seed)
    query, key, value = (draw.normal(size=(2, 3, time, width)).astype(np.float32) for _ in range(3))
    return query * np.float32(scale), key, value


@pytest.mark.parametrize("how", [F.scaled_dot_product_attention, FlashByHand.apply], ids=["fused", "by hand"])
@pytest.mark.parametrize("time", [48, 128])
def test_the_formula_loses_what_flash_attention_loses_on_peaked_rows(how, time):
    arrays = draw_attention(time, 0, 12.0)
    wanted = run(subject_of(Attends(plainly)), *arrays, dtype="float64")
    real = loss(run(subject_of(Attends(how)), *arrays), wanted)
    for subject in (subject_of(Attends(plainly)), subject_of(Attends(F.scaled_dot_product_attention))):
        found = run(subject, *arrays, mode="logsumexp")
        assert found.moved == 2  # forward and backward
        assert (real < 2.0 * loss(found, wanted)).all()
        assert (loss(found, wanted) < 1e-5).all()
        np.testing.assert_allclose(found.outputs[0], wanted.outputs[0], rtol=1e-3, atol=3e-5)


def test_plain_softmax_loses_less_than_the_formula():
    arrays = draw_attention(48, 0, 12.0)
    subject = subject_of(Attends(plainly))
    wanted = run(subject, *arrays, dtype="float64")
    assert (loss(run(subject, *arrays), wanted) * 1.5 < loss(run(subject, *arrays, mode="logsumexp"), wanted)).all()


OPTIONS = {
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.4},
    "bias": {"attn_mask": torch.randn(7, 7, generator=torch.Generator().manual_seed(0))},
    "scale": {"scale": 0.3},
    "a row that sees nothing": {"attn_mask": torch.tensor([[True] * 7] * 3 + [[False] * 7] + [[True] * 7] * 3)},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_matches_the_kernel(name, dtype):
    query, key, value = draw_attention(7, 1, 2.0, 8)
    if name == "grouped":
        key, value = key[:, :1], value[:, :1]
    subject = subject_of(Attends(F.scaled_dot_product_attention, **OPTIONS[name]))
    arguments = Arguments((query, key, value))
    cotangents = [np.random.default_rng(1).normal(size=query.shape).astype(np.float32)]
    wanted = subject.run({}, arguments, cotangents)
    found = subject.run({}, arguments, cotangents, mode="logsumexp", dtype=None if dtype == "float32" else dtype)
    assert found.moved >= 2
    for one, two in zip(everything(found), everything(wanted), strict=True):
        assert one.dtype.name == dtype
        close = 1e-5 if dtype == "float32" else 4e-2
        np.testing.assert_allclose(one.astype(np.float32), two, rtol=close, atol=close * np.abs(two).max())


@pytest.mark.parametrize("seed", [STILL, 0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_fused_attention_by_plain_operations_matches_the_kernel(name, seed):
    query, key, value = draw_attention(7, 1, 2.0, 8)
    if name == "grouped":
        key, value = key[:, :1], value[:, :1]
    subject = subject_of(Attends(F.scaled_dot_product_attention, **OPTIONS[name]))
    arguments, cotangents = Arguments((query, key, value)), [np.random.default_rng(1).normal(size=query.shape)]
    wanted = subject.run({}, arguments, cotangents, dtype="float64")
    found = subject.run({}, arguments, cotangents, mode="flash", seed=seed)
    assert found.moved == 2  # forward and backward
    for one, two in zip(everything(found), everything(wanted), strict=True):
        assert one.dtype.name == "float64"
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-13)


def test_no_other_attention_is_taken_for_a_fused_one():
    arrays = draw_attention(7, 1, 2.0, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        by_math = run(subject_of(Attends(F.scaled_dot_product_attention)), *arrays, mode="flash")
    subject = subject_of(Attends(plainly))
    plain = run(subject, *arrays, mode="flash", seed=1)
    assert (by_math.moved, plain.moved) == (0, 0)
    assert_same(plain, run(subject, *arrays, dtype="float64"))


def lost_in_float64(*arrays):
    """Return per gradient of fused attention what its kernel loses in float64, and what the formula does."""
    subject = subject_of(Attends(F.scaled_dot_product_attention))
    kernel = run(subject, *arrays, dtype="float64").input_gradients
    still, *drawn = (run(subject, *arrays, mode="flash", seed=seed).input_gradients for seed in (STILL, 0, 1))
    by_kernel = [np.abs(one - two).max() for one, two in zip(kernel, still, strict=True)]
    by_formula = [max(np.abs(one[i] - two).max() for one in drawn) for i, two in enumerate(still)]
    return np.array(by_kernel), np.array(by_formula)


@pytest.mark.parametrize("width", [3, 32])
@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_the_formula_loses_as_much_as_the_kernel_in_float64(size, width):
    """It grows with the scores, and is measured, not bounded: far above it a fault is seen."""
    by_kernel, by_formula = lost_in_float64(*draw_attention(48, 0, size, width))
    assert (by_kernel < 4.0 * by_formula).all()
    assert (by_formula < 30.0 * by_kernel).all()
    assert (by_formula < 4e-15 * (size + 10.0) ** 2).all()


def test_a_part_common_to_all_keys_amplifies_rounding():
    """Softmax does not see it, and a row's gradients of scores add up to zero but for that rounding."""
    query, key, value = draw_attention(48, 0, 0.01)
    by_kernel, by_formula = lost_in_float64(query, key + np.float32(1e4), value)
    alone = lost_in_float64(query, key, value)[1]
    assert by_formula[0] > 100.0 * alone[0]
    assert (by_kernel < 4.0 * by_formula).all()


def test_the_formulas_loss_does_not_contain_a_kernels_fault():
    def wrong(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
        return 2.0 * query, 2.0 * key, 2.0 * value

    arrays = draw_attention(12, 0, 5.0)
    right = lost_in_float64(*arrays)
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is replaced
        library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", wrong, "CPU")
        found = lost_in_float64(*arrays)
    np.testing.assert_array_equal(found[1], right[1])
    assert (found[0] > 1e10 * right[0]).all()
