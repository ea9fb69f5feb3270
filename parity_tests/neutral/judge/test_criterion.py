"""The rule on its own: what it lets through and what it does not, without any framework."""

from __future__ import annotations

import dataclasses
import itertools
import types

import ml_dtypes
import numpy as np
import pytest

from attn_parity.sides.subject import Arguments
from attn_parity.verdict.bench import Bench
from attn_parity.verdict.criterion import agree, decide
from attn_parity.verdict.measures import (
    FLASH_LIMIT,
    FLOOR_ULPS,
    GROUP_FACTOR,
    FarEntries,
    measure,
    sum_floor,
    with_flash_loss,
)
from attn_parity.verdict.probes import Probing
from attn_parity.verdict.runner import _units, measured_noise

SIDE_OF = {"torch": "first", "flax": "second"}


def draw(seed, size=400):
    return np.random.default_rng(seed).normal(size=size)


def noisy(truth, seed, ulps, dtype="float32"):
    eps = float(ml_dtypes.finfo(dtype).eps)
    return truth + np.random.default_rng(seed).normal(size=truth.shape) * ulps * eps * np.abs(truth).max()


def judge(samples, dtype="float32", kind_scale=0.0, **keywords):
    """Judge samples of (torch, flax, torch float64, flax float64), a group each."""
    measures = [
        measure(*sample, kind_scale=kind_scale, dtype=dtype, group=number, weights="own", sample=number)
        for number, sample in enumerate(samples)
    ]
    return decide("t", "t", "output", np.shape(samples[0][0]), dtype, measures, **keywords)


def meaning(one, two, scale=0.0):
    return judge([(one, two, one, two)], "float64", scale)


def noise_between_runs(step):
    """Return the noise of two sides whose results grow by `step` units of float32 from run to run."""
    runs = itertools.count()

    def run(side, sample, dtype, mode):
        return {"output": ("output", np.array([1.0, 1.0 + next(runs) * step * 2**-23]))}

    pair = types.SimpleNamespace(
        named=lambda side, run: run, labels={"first": "a", "second": "b"}, train=True, lacks={}
    )
    runner = types.SimpleNamespace(pair=pair, sample=lambda spec: None, run=run)
    return measured_noise(runner, "float32", ("eager",))


def test_only_sides_that_differ_from_themselves_have_noise():
    assert noise_between_runs(0).floors == {"output": 0.0}
    assert noise_between_runs(3).floors["output"] == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_meaning_allows_rounding_and_nothing_more(seed):
    truth = draw(seed)
    assert meaning(truth * (1 + 1e-13), truth).verdict == "equal"
    off = truth.copy()
    off[17] += 1e-11 * np.abs(truth).max()
    result = meaning(off, truth)
    assert (result.verdict, result.worst.index, result.bad, result.count) == ("different", (17,), 1, 400)
    assert (result.worst.first, result.worst.second) == (off[17], truth[17])


def test_a_loss_of_precision_shows_numbers_of_that_precision():
    truth = draw(5)
    first, second = noisy(truth, 2, 1), noisy(truth, 3, 500)
    apart = truth.copy()
    apart[3] += 1e-9  # what tables may explain
    sample = measure(first, second, truth, apart, kind_scale=0.0, dtype="float32", group=0, weights="own", sample=0)
    result = decide("t", "t", "output", truth.shape, "float32", [dataclasses.replace(sample, allowance=1e-8)])
    assert (result.verdict, result.side) == ("precision", "flax")
    at = result.worst.index
    assert at == (int(np.abs(second - apart).argmax()),)
    assert (result.worst.first, result.worst.second) == (first[at], second[at])


def test_ill_conditioned_tensors_may_differ_by_their_predicted_rounding():
    truth = draw(1)
    low = [noisy(truth, 2, 1e4), noisy(truth, 3, 1e4)]
    apart = truth + 1e-11 * np.abs(truth).max()
    assert judge([(*low, truth, apart)]).verdict == "equal"
    well = [noisy(truth, 2, 1), noisy(truth, 3, 1)]
    assert judge([(*well, truth, apart)]).verdict == "different"
    assert judge([(low[0], well[1], truth, apart)]).verdict == "precision", "one imprecise side is not excused"


@pytest.mark.parametrize("side", ["torch", "flax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "equal"), (2.0, "equal"), (6.0, "precision")])
def test_precision_is_relative_to_the_other_sides_own_error(dtype, ratio, verdict, side):
    samples = []
    for seed in range(4):
        truth = draw(seed)
        pair = [noisy(truth, 10 + seed, 3 * ratio, dtype), noisy(truth, 20 + seed, 3, dtype)]
        samples.append((*(pair if side == "torch" else pair[::-1]), truth, truth))
    result = judge(samples, dtype)
    assert result.verdict == verdict
    assert result.side == (side if verdict == "precision" else None)
    other = "flax" if side == "torch" else "torch"
    assert judge(samples, dtype, sides=(SIDE_OF[other],)).verdict == "equal", "only the sides that are asked about"


def of_one(first, second):
    """Return the measure of one number in float64."""
    one, two = np.array([first]), np.array([second])
    given = {"kind_scale": 0.0, "dtype": "float64", "group": 0, "weights": "own", "sample": 0}
    return measure(one, two, one, two, **given)


def test_an_element_that_is_nan_in_both_precisions_counts_once():
    one = np.linspace(1.0, 2.0, 6, dtype=np.float32)
    two = np.where(np.arange(6) < 2, np.nan, one)
    sides = one, two, one.astype(np.float64), two.astype(np.float64)
    found = measure(*sides, kind_scale=2.0, dtype="float32", group=0, weights="own", sample=0)
    assert (found.mismatched, found.finite) == (2, 4)


@pytest.mark.parametrize("scale", [1.0, 50.0])
@pytest.mark.parametrize(("apart", "verdict"), [(1e-11, "equal"), (2e-11, "different")])
def test_fused_attention_is_allowed_four_times_what_its_formula_loses(apart, verdict, scale):
    one = of_one(scale, scale * (1.0 + apart))
    for given, expected in ((one, "different"), (with_flash_loss(one, scale * 3e-12), verdict)):
        assert decide("x", "x", "input gradient", (1,), "float64", [given]).verdict == expected


def test_the_fused_attention_allowance_is_bounded_and_adds_to_tables():
    one = dataclasses.replace(of_one(1.0, 1.0), allowance=1e-4)
    assert with_flash_loss(one, 1.0).allowance == 1e-4 + FLASH_LIMIT
    assert with_flash_loss(one, 0.0).allowance == 1e-4


def test_one_wild_element_fails_although_the_rms_is_fine():
    truth = draw(0, 100_000)
    candidate = noisy(truth, 2, 1)
    candidate[5] += 200 * np.finfo(np.float32).eps * np.abs(truth).max()
    result = judge([(candidate, noisy(truth, 1, 1), truth, truth)])
    assert (result.verdict, result.side, result.worst.index) == ("precision", "torch", (5,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_of_subnormal_numbers_is_finite(dtype):
    """Gradients of saturated rows are; a unit in their last place is zero."""
    tiny = {"t": ("vector gradient", np.array([1e-310, 3e-310]))}
    other = {"t": ("vector gradient", np.array([1e-310, 2e-310]))}
    assert np.isfinite(_units(tiny, other, dtype)["t"])
    assert _units(tiny, other, "float64") == {"t": 0.0}
    twice = {"t": ("vector gradient", np.array([2.0, 1.0]))}
    assert _units(twice, {"t": ("vector gradient", np.array([2.0, 1.5]))}, "float64")["t"] == 0.25 / 2.0**-52


def test_one_unlucky_seed_does_not_decide_the_verdict():
    samples = []
    for seed in range(8):
        truth = draw(seed)
        samples.append((noisy(truth, 10 + seed, 2), noisy(truth, 20 + seed, 2), truth, truth))
    truth = draw(99)
    unlucky = [(noisy(truth, 1, 8), noisy(truth, 2, 1), truth, truth)]
    assert judge(samples + unlucky).verdict == "equal"
    assert judge(unlucky).verdict == "precision"
    hopeless = [(noisy(truth, 1, 80), noisy(truth, 2, 1), truth, truth)]
    assert judge(samples + hopeless).verdict == "precision", "one seed may be off by a few times, not by dozens"


def test_hard_inputs_speak_about_the_meaning_alone():
    truth = draw(3)
    keywords = {"kind_scale": 0.0, "dtype": "float32", "group": 0, "weights": "own", "sample": 0, "stress": True}
    imprecise = measure(noisy(truth, 1, 500), noisy(truth, 2, 1), truth, truth, **keywords)
    assert decide("t", "t", "output", truth.shape, "float32", [imprecise]).verdict == "equal"
    other = measure(noisy(truth, 1, 1), noisy(truth, 2, 1), truth, truth * 1.001, **keywords)
    assert decide("t", "t", "output", truth.shape, "float32", [other]).verdict == "different"


def test_an_exactly_zero_tensor_is_judged_by_the_floor():
    zero, eps = np.zeros(8), float(np.finfo(np.float32).eps)
    within, beyond = np.full(8, 0.4 * eps * 5), np.full(8, 0.6 * eps * 5)
    assert judge([(within, zero, zero, zero)], kind_scale=5.0).verdict == "equal"
    assert judge([(beyond, zero, zero, zero)], kind_scale=5.0).verdict == "precision"
    assert judge([(beyond, zero, zero, zero)], kind_scale=5.0, noise=0.2).verdict == "equal"


def test_the_floor_grows_with_the_rows_of_a_sum():
    assert sum_floor("float32", 4) == sum_floor("float64", 10_000) == 0.0
    assert sum_floor("float32", 64) == 1.5
    assert sum_floor("bfloat16", 1) == 0.0
    assert sum_floor("bfloat16", 64) == sum_floor("float16", 64) == 3.5


@pytest.mark.parametrize(("ulps", "samples"), [(2, [0, 1, 2]), (1e5, [0])])
def test_roundings_are_drawn_again_until_the_first_sample_rules_them_out(ulps, samples):
    truth = draw(3)
    loses = [truth, noisy(truth, 1, ulps), truth, truth]
    named = [
        measure(*loses, kind_scale=0.0, dtype="float32", group=number, weights="own", sample=number)
        for number in range(3)
    ]
    seen = []
    probing = types.SimpleNamespace(
        pair=types.SimpleNamespace(progress=lambda *_: None, shown={"first": "a"}),
        runner=types.SimpleNamespace(sample=lambda number: seen.append(number) or number),
        roundings=lambda *_: [],
        dtype="float32",
    )
    raised = Probing.raised(probing, "first", range(3), {("output", "eager"): named}, {})
    assert seen == samples
    assert len(raised["output", "eager"]) == len(samples)


@pytest.mark.parametrize("kind", ["output", "input gradient", "matrix gradient", "vector gradient"])
def test_only_gradients_of_parameters_are_sums_over_rows(kind):
    pair = types.SimpleNamespace(arguments={"first": Arguments((np.zeros((8, 8, 3)),))})
    growth = Bench._growth(types.SimpleNamespace(pair=pair, dtype="float32"), kind)
    assert growth == (1.5 if kind.startswith(("matrix", "vector")) else 0.0)


@pytest.mark.parametrize("rows", [2_000, 20_000])
def test_sequential_sums_pass_and_coarser_sums_fail(rows):
    naive, coarse = [], []
    for seed in range(4):
        one, two = np.random.default_rng([seed, rows]).normal(size=(2, rows, 32)).astype(np.float32)
        products, truth = one * two, (one.astype(np.float64) * two).sum(0)
        pairwise = np.ascontiguousarray(products.T).sum(1)
        naive.append((np.add.accumulate(products)[-1], pairwise, truth, truth))
        coarse.append((products.astype(ml_dtypes.bfloat16).astype(np.float32).sum(0), pairwise, truth, truth))
    noise = sum_floor("float32", rows)
    assert judge(naive).verdict == "precision"
    assert judge(naive, noise=noise).verdict == "equal"
    assert judge(coarse, noise=noise).verdict == "precision"


def test_without_float64_the_noise_allowance_decides():
    truth = draw(4)
    apart = noisy(truth, 1, 3)
    assert judge([(truth, apart, None, None)], noise=20.0).verdict == "equal"
    result = judge([(truth, truth * 1.01, None, None)], noise=20.0)
    assert (result.verdict, result.relative) == ("different", None)


def test_one_sides_float64_is_the_truth_for_both():
    truth = draw(4)
    good, bad = noisy(truth, 1, 1), noisy(truth, 2, 50)
    result = judge([(good, bad, truth, None)] * 2)
    assert (result.verdict, result.side) == ("precision", "flax")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_equal_only_at_equal_places(value):
    truth = draw(1)
    both = truth.copy()
    both[3] = value
    assert meaning(both, both.copy()).verdict == "equal"
    assert meaning(both, truth).verdict == meaning(truth, both).verdict == "different"
    assert judge([(both, truth, truth, truth)]).verdict == "different"
    assert judge([(both, truth, truth, truth)]).worst.index == (3,)
    if not np.isnan(value):
        negated = both.copy()
        negated[3] = -value
        assert meaning(negated, both).verdict == "different"


def test_a_tensor_without_finite_elements_is_inconclusive():
    nothing = np.full(5, np.nan)
    result = judge([(nothing, nothing, nothing, nothing)])
    assert (result.verdict, result.message) == (
        "inconclusive",
        "no element is finite on both sides, so nothing was compared",
    )


def test_arrays_of_two_shapes_are_never_measured():
    with pytest.raises(ValueError, match=r"one shape, got \(2, 3\) and \(3, 2\)"):
        meaning(np.zeros((2, 3)), np.zeros((3, 2)))


def test_nothing_to_compare_passes_without_a_warning():
    assert meaning(np.zeros((0, 3)), np.zeros((0, 3))).verdict == "equal"


def test_any_difference_fails_where_the_kinds_scale_is_zero():
    assert meaning(np.array([1e-300]), np.array([0.0])).verdict == "different"
    assert meaning(np.array([0.0]), np.array([0.0])).verdict == "equal"


def test_large_and_non_contiguous_arrays_are_measured_whole():
    truth = draw(5, 300_000).reshape(500, 600).T
    off = truth.copy()
    off[599, 499] += 1e-6
    off[0, 1] += 1e-7
    result = meaning(off, truth)
    assert (result.verdict, result.bad, result.worst.index, result.count) == ("different", 2, (599, 499), 300_000)


# ---- whether two results agree, without float64


def known(first_max, second_max):
    truth = draw(0)
    one = measure(truth, truth, truth, truth, kind_scale=0.0, dtype="float32", group=0, weights="own", sample=0)
    return dataclasses.replace(one, first_max=first_max, second_max=second_max)


def agreeing(one, two, *, dtype="float32", kind_scale=0.0, measures=None):
    with np.errstate(invalid="ignore"):  # as compare does
        return agree(one, two, dtype, kind_scale, measures or [known(2.0, 3.0)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("place", [0, 17, 99_999])
@pytest.mark.parametrize(("part", "expected"), [(0.99, True), (1.01, False)])
def test_samples_agree_within_a_multiple_of_others_rounding(dtype, place, part, expected):
    one = draw(1, 100_000)
    allowed = (GROUP_FACTOR * 5.0 + FLOOR_ULPS) * float(ml_dtypes.finfo(dtype).eps) * np.abs(one).max()
    two = one.copy()
    two[place] -= part * allowed
    assert agreeing(one, two, dtype=dtype) is expected


def test_the_worst_of_the_other_samples_says_what_is_allowed():
    one = draw(2)
    two = one + 30.0 * np.finfo(np.float32).eps * np.abs(one).max()
    assert not agreeing(one, two)
    assert agreeing(one, two, measures=[known(2.0, 3.0), known(1.0, 9.0), known(0.5, 0.5)])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("both", [False, True])
def test_results_that_are_not_finite_never_agree(value, both):
    one, two = draw(3), draw(3)
    one[5] = value
    two[5] = value if both else two[5]
    assert not agreeing(one, two)  # float64 is to say what that means


def test_tiny_values_are_compared_at_their_kinds_scale():
    one, two = 1e-9 * draw(4), -1e-9 * draw(4)
    assert not agreeing(one, two)
    assert agreeing(one, two, kind_scale=1e3)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_results_of_any_shape_agree_with_themselves(shape):
    one = np.asarray(np.random.default_rng(5).normal(size=shape))
    assert agreeing(one, one.copy())
    assert agreeing(one, one + 1.0) is (one.size == 0)


def test_memory_order_does_not_affect_comparison():
    one = np.random.default_rng(6).normal(size=(300, 400))
    assert agreeing(one, np.asfortranarray(one))
    assert not agreeing(one, one[::-1])


@pytest.mark.parametrize(
    ("truth", "error", "scale"),
    [
        ([-1e9, 2.0, -0.5], 1e-7, 2.0),
        ([-1e9, 2.0, -0.5], 30.0, None),  # rounding errors of the large number
        ([-1e9, 2e5, -3e4], 1e-7, None),  # sizes without a gap
        ([-1e9, 0.0, 0.0], 0.0, None),
        ([5e3, 2e-3, 1e-3], 0.0, None),  # no constant of a mask is so small
        ([np.inf, -1e9, 2.0], 1e-7, 2.0),
        ([np.nan, 1.0, 2.0], 0.0, None),
    ],
)
def test_entries_are_far_if_the_others_are_numbers_of_their_own(truth, error, scale):
    truth = np.array(truth)
    found = FarEntries.of(truth, (truth + error, truth + 2 * error))
    assert (found and found.scale) == scale
