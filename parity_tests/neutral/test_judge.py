"""The rule on its own: what it lets through and what it does not, without any framework."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from attn_bridge.parity import judge_meaning, judge_precision


def draw(seed, size=400):
    return np.random.default_rng(seed).normal(size=size)


def noisy(truth, seed, ulps, dtype="float32"):
    eps = float(ml_dtypes.finfo(dtype).eps)
    return truth + np.random.default_rng(seed).normal(size=truth.shape) * ulps * eps * np.abs(truth).max()


def judge(truths, candidates, trusted, dtype="float32", **keywords):
    scales = [float(np.abs(truth).max()) for truth in truths]
    return judge_precision("t", candidates, trusted, truths, scales, dtype, **keywords)


@pytest.mark.parametrize("seed", range(5))
def test_meaning_allows_rounding_and_nothing_more(seed):
    truth = draw(seed)
    scale = [float(np.abs(truth).max())]
    assert judge_meaning("t", [truth * (1 + 1e-13)], [truth], scale).passed
    off = truth.copy()
    off[17] += 1e-11 * scale[0]
    result = judge_meaning("t", [off], [truth], scale)
    assert not result.passed
    assert (result.index, result.bad, result.count) == ((17,), 1, 400)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("ratio", "passes"), [(1.0, True), (2.0, True), (6.0, False)])
def test_precision_is_relative_to_the_other_sides_own_error(dtype, ratio, passes):
    truths = [draw(seed) for seed in range(3)]
    trusted = [noisy(truth, 10 + seed, 3, dtype) for seed, truth in enumerate(truths)]
    candidates = [noisy(truth, 20 + seed, 3 * ratio, dtype) for seed, truth in enumerate(truths)]
    assert judge(truths, candidates, trusted, dtype).passed is passes


def test_one_wild_element_fails_although_the_rms_is_fine():
    truths = [draw(0, 100_000)]
    trusted = [noisy(truths[0], 1, 1)]
    candidate = noisy(truths[0], 2, 1)
    candidate[5] += 200 * np.finfo(np.float32).eps * np.abs(truths[0]).max()
    assert not judge(truths, [candidate], trusted).passed


def test_a_tensor_that_is_zero_in_exact_arithmetic_is_judged_by_the_floor():
    zero, scale, eps = [np.zeros(8)], [5.0], float(np.finfo(np.float32).eps)
    within, beyond = [np.full(8, 0.4 * eps * 5)], [np.full(8, 0.6 * eps * 5)]
    assert judge_precision("t", within, zero, zero, scale, "float32").passed
    assert not judge_precision("t", beyond, zero, zero, scale, "float32").passed


def test_the_floor_grows_with_the_rows_of_a_sum_in_16_bits_only():
    zero, scale = [np.zeros(8)], [1.0]
    for dtype, passes in (("bfloat16", True), ("float16", True), ("float32", False)):
        error = [np.full(8, 3 * float(ml_dtypes.finfo(dtype).eps))]
        assert judge_precision("t", error, zero, zero, scale, dtype, rows=64).passed is passes
        assert not judge_precision("t", error, zero, zero, scale, dtype, rows=1).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_counts_as_equal_only_at_the_same_place_with_the_same_value(value):
    truth = draw(1)
    both = truth.copy()
    both[3] = value
    assert judge_meaning("t", [both], [both.copy()], [1.0]).passed
    assert not judge_meaning("t", [both], [truth], [1.0]).passed
    assert not judge_meaning("t", [truth], [both], [1.0]).passed
    assert not judge([truth], [both], [truth]).passed
    if not np.isnan(value):
        negated = both.copy()
        negated[3] = -value
        assert not judge_meaning("t", [negated], [both], [1.0]).passed


def test_another_shape_is_a_mismatch():
    assert not judge_meaning("t", [np.zeros((2, 3))], [np.zeros((3, 2))], [1.0]).passed
    assert not judge_meaning("t", [np.zeros(1)], [np.zeros(3)], [1.0]).passed


def test_nothing_to_compare_passes_without_a_warning():
    assert judge_meaning("t", [np.zeros((0, 3))], [np.zeros((0, 3))], [0.0]).passed


def test_any_difference_is_a_mismatch_where_the_whole_kind_is_zero():
    assert not judge_meaning("t", [np.array([1e-300])], [np.array([0.0])], [0.0]).passed
    assert judge_meaning("t", [np.array([0.0])], [np.array([0.0])], [0.0]).passed
