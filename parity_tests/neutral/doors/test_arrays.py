"""Three arrays: what `as_precise` lets through and what not, in NumPy alone."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import parity
from attn_parity.verdict.roundings import distance

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def softmax(x, exp=np.exp):
    weights = exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class Attention:
    """Non-causal attention of one draw: what is trusted, the oracle, and kernels, right and wrong ones."""

    def __init__(self, dtype, shape, seed):
        self.dtype = DTYPES[dtype]
        given = [np.random.default_rng((seed, i)).normal(size=shape).astype(self.dtype) for i in range(3)]
        q, k, v = (one.astype(np.float64) for one in given)
        self.oracle = softmax(q @ k.swapaxes(-1, -2) * shape[-1] ** -0.5) @ v
        q, k, self.v = (one.astype(np.float32) for one in given)
        self.scores = q @ k.swapaxes(-1, -2) * np.float32(shape[-1] ** -0.5)
        self.trusted = self.rounded(softmax(self.scores) @ self.v)

    def rounded(self, x):
        return x.astype(self.dtype)

    def flash(self, exp=np.exp, block=8, accumulator=np.float32, weights=None):
        """Return attention block by block, with a running maximum, as fused kernels compute it."""
        top = np.full((*self.scores.shape[:-1], 1), -np.inf, np.float32)
        total, out = np.zeros_like(top), np.float32(0.0)
        for start in range(0, self.scores.shape[-1], block):
            scores = self.scores[..., start : start + block]
            new = np.maximum(top, scores.max(axis=-1, keepdims=True))
            old, part = exp(top - new), exp(scores - new)
            total = (total * old + part.sum(axis=-1, keepdims=True)).astype(accumulator).astype(np.float32)
            part = part if weights is None else part.astype(weights).astype(np.float32)
            added = out * old + part @ self.v[..., start : start + block, :]
            out, top = added.astype(accumulator).astype(np.float32), new
        return self.rounded(out / total)

    def judge(self, got):
        return parity.as_precise(got, self.trusted, self.oracle)


class Product:
    """A product with matrices, for sums in several orders."""

    def __init__(self, dtype, shape, seed):
        self.dtype, rng = DTYPES[dtype], np.random.default_rng(seed)
        x, w = rng.normal(size=shape), rng.normal(size=(shape[-1], 64)) * shape[-1] ** -0.5
        x, w = x.astype(self.dtype), w.astype(self.dtype)
        self.oracle = x.astype(np.float64) @ w.astype(np.float64)
        self.x, self.w = x.astype(np.float32), w.astype(np.float32)
        self.trusted = (self.x @ self.w).astype(self.dtype)

    def summed(self, accumulator=np.float32, step=1, wide=np.float32, reverse=False):
        """Return the sum, `step` numbers at a time, each partial sum rounded to `accumulator`."""
        total = np.zeros(self.oracle.shape, wide)
        starts = range(0, self.w.shape[0], step)
        for start in reversed(starts) if reverse else starts:
            part = self.x[..., start : start + step].astype(wide) @ self.w[start : start + step].astype(wide)
            total = (total + part).astype(accumulator).astype(wide)
        return total.astype(self.dtype)

    def judge(self, got):
        return parity.as_precise(got, self.trusted, self.oracle)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", [(2, 4, 32, 32), (100, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_roundings_pass(dtype, shape, seed):
    attention = Attention(dtype, shape, seed)
    kernels = {
        "blocks": attention.flash(),
        "other blocks": attention.flash(block=16),
        "rounded weights": attention.flash(weights=DTYPES[dtype]),
        "by exp2": attention.flash(exp=lambda x: np.exp2(x * np.float32(np.log2(np.e)))),
    }
    product = Product(dtype, shape, seed)
    sums = {
        "one after the other": product.summed(),
        "backwards": product.summed(reverse=True),
        "blocks": product.summed(step=16),
        "fused multiply-add": product.summed(wide=np.float64),
        "from float64": product.oracle.astype(product.dtype),
    }
    for subject, results in ((attention, kernels), (product, sums)):
        for name, got in results.items():
            assert subject.judge(got).verdict == "equal", (name, str(subject.judge(got)))
            if name != "rounded weights":
                parity.assert_as_precise(got, subject.trusted, subject.oracle, rounds_once=True)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", [(4, 2, 64, 64), (8, 64, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_that_rounding_hides_fail(dtype, shape, seed):
    """`exp` off by 1e-4, and scales off by 2**-10: in 16 bits less than the rounding of each element."""
    attention = Attention(dtype, shape, seed)
    weights = softmax(attention.scores)
    up, down = np.float32(1 + 1e-4), np.float32(1 - 1e-4)
    plain, oracle = np.exp(attention.scores).astype(attention.dtype), np.exp(attention.scores.astype(np.float64))
    for name, factor in (("up", up), ("down", down), ("scaled", np.float32(1 + 2**-10))):
        got = (np.exp(attention.scores) * factor).astype(attention.dtype)
        found = parity.as_precise(got, plain, oracle)
        assert found.verdict in ("precision", "different"), (name, str(found))
        assert found.share > 1
    for factor in (np.float32(1 + 2**-10), np.float32(1 - 2**-10)):
        found = attention.judge(attention.rounded(weights @ attention.v * factor))
        assert found.verdict in ("precision", "different"), str(found)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [
        ("float32", np.float16),
        ("float32", ml_dtypes.bfloat16),
        ("float16", np.float16),
        ("float16", ml_dtypes.bfloat16),
        ("bfloat16", ml_dtypes.bfloat16),
    ],
)
@pytest.mark.parametrize("shape", [(64, 256), (2, 4, 512)])
def test_sums_in_16_bits_fail(shape, dtype, accumulator, seed):
    product = Product(dtype, shape, seed)
    found = product.judge(product.summed(accumulator))
    assert found.verdict in ("precision", "different"), str(found)
    with pytest.raises(parity.ParityError, match=f"^{found.verdict}: {dtype}"):
        parity.assert_as_precise(product.summed(accumulator), product.trusted, product.oracle)


def exponential(dtype, factor, seed, size=1000, exp=np.exp):
    """Return `exp` with a factor, rounded once, next to a trusted result and the oracle."""
    x = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    results = [(exp(x) * np.float32(factor)).astype(DTYPES[dtype]), np.exp(x).astype(DTYPES[dtype])]
    return *results, np.exp(x.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4])
def test_a_thousand_values_show_an_exp_that_is_off(dtype, factor):
    for seed in range(20):
        found = parity.as_precise(*exponential(dtype, factor, seed), rounds_once=True)
        assert found.verdict in ("precision", "different"), (seed, str(found))
        if dtype == "bfloat16":  # the signs alone show it, next to the elements that keep their place
            found = parity.as_precise(*exponential(dtype, factor, seed, 2000))
            assert found.verdict == "precision"
            assert found.message.startswith("its errors have one sign")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exp_by_powers_of_two_passes(dtype):
    """With a product in front that is rounded, up to 3.4 units off where `trusted` has half of one."""
    for seed in (0, 237, 548, 551, 645):
        got = exponential(dtype, 1, seed, exp=lambda x: np.exp2(x * np.float32(np.log2(np.e))))
        parity.assert_as_precise(*got, rounds_once=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_in_float16_are_not_rounded_once(dtype):
    product = Product(dtype, (8, 16), 0)
    found = parity.as_precise(product.summed(np.float16), product.trusted, product.oracle, rounds_once=True)
    assert found.verdict == "precision"
    assert re.fullmatch(r"\d+ of 512 elements are not float32's results, rounded once", found.message)
    if dtype == "bfloat16":  # no larger than the rounding of weights, which right kernels do
        assert product.judge(product.summed(np.float16)).verdict == "equal"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_roundings_that_elements_share_have_both_signs(dtype):
    """A denominator per row, a weight per column, and equal numbers."""
    for seed in range(5):
        rng, kind = np.random.default_rng(seed), DTYPES[dtype]
        x = rng.normal(size=(128, 96)).astype(kind)
        for factors in (rng.uniform(1, 2, (128, 1)), rng.uniform(1, 2, 96)):
            oracle, wide = x.astype(np.float64) * factors, x.astype(np.float32)
            trusted = (wide * factors.astype(np.float32)).astype(kind)
            got = (wide * factors.astype(kind).astype(np.float32)).astype(kind)
            assert parity.as_precise(got, trusted, oracle).verdict == "equal"
            assert parity.as_precise(got, trusted, oracle, rounds_once=True).verdict == "precision"
        few = np.repeat(rng.uniform(1, 2, 10), 200)
        rounded = (few.astype(np.float32) + np.float32(1000)).astype(kind).astype(np.float32) - np.float32(1000)
        mixed = (few + (rounded - few.astype(np.float32)) * 1e-3).astype(kind)
        assert parity.as_precise(mixed, few.astype(kind), few).verdict == "equal"


def test_the_interval_of_numbers_that_round_to_an_element():
    for dtype in ("bfloat16", "float16"):
        kind, unit = DTYPES[dtype], float(ml_dtypes.finfo(DTYPES[dtype]).eps)
        result = np.array([1, 1, 1, 1, -1, 2, 0], kind)
        oracle = np.array([1 + unit / 2, 1 + unit, 1 - unit / 4, 1 - unit, -1 - unit, 2 - unit, 0.0])
        wanted = [0, -unit / 2, 0, 3 * unit / 4, unit / 2, unit / 2, 0]
        assert distance(result, oracle).tolist() == wanted
        top = np.array([ml_dtypes.finfo(kind).max], kind)
        assert distance(top, top.astype(np.float64) * (1 + unit / 8)).tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_that_is_better_than_the_trusted_one_passes(dtype):
    product = Product(dtype, (64, 256), 0)
    better = product.trusted
    for worse in (product.summed(np.float16), (better.astype(np.float32) * np.float32(0.99)).astype(product.dtype)):
        assert parity.as_precise(better, worse, product.oracle).verdict == "equal"
        assert parity.as_precise(worse, worse, product.oracle).verdict == "equal"


def test_the_report_names_the_worst_element():
    product = Product("float32", (4, 8, 64), 0)
    got = product.trusted.copy()
    got[2, 3, 4] += 0.01
    found = product.judge(got)
    assert (found.verdict, found.passed, found.worst.index) == ("different", False, (2, 3, 4))
    values = got[2, 3, 4], product.trusted[2, 3, 4], product.oracle[2, 3, 4]
    assert (found.worst.got, found.worst.trusted, found.worst.oracle) == values
    with pytest.raises(AssertionError) as error:
        parity.assert_as_precise(got, product.trusted, product.oracle)
    assert error.value.report == found
    assert re.fullmatch(
        r"different: float32 \[4, 8, 64\], [\d.]+e\+03 x the allowed error: its rounding error is [\d.]+ ulps, that of "
        r"trusted [\d.]+; worst at \(2, 3, 4\): got [-\d.]+, trusted [-\d.]+, oracle [-\d.]+",
        str(error.value),
    )


def test_a_share_is_that_of_what_is_allowed():
    oracle = np.linspace(1.0, 2.0, 1000)
    trusted = oracle.astype(np.float32)
    unit = 2.0**-23 * 2.0  # of the largest value
    rms = np.sqrt(np.mean(np.square(trusted - oracle)))
    allowed = 3.0 * rms + 0.5 * unit
    for share in (0.9, 1.1):
        got = (oracle + share * allowed).astype(np.float32)
        found = parity.as_precise(got, trusted, oracle)
        assert found.share == pytest.approx(share, rel=0.02)
        assert found.verdict == ("equal" if share < 1 else "precision")


def test_long_sums_in_another_order_are_allowed_by_their_terms():
    x = np.random.default_rng(0).uniform(size=(200, 4096)).astype(np.float32)
    oracle = x.astype(np.float64).sum(axis=1)
    got = x.cumsum(axis=1, dtype=np.float32)[:, -1]
    trusted = x.sum(axis=1)
    assert parity.as_precise(got, trusted, oracle).verdict == "precision"
    assert parity.as_precise(got, trusted, oracle, terms=4096).verdict == "equal"
    short = x.astype(np.float16).astype(np.float32)
    half = short[:, :512].astype(np.float16).cumsum(axis=1, dtype=np.float16)[:, -1]
    exact = short[:, :512].astype(np.float64).sum(axis=1)
    assert not parity.as_precise(half, exact.astype(np.float16), exact, terms=512).passed, "kernels add in float32"


NUMBERS = np.random.default_rng(7).normal(size=(8, 16))
NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("got", "trusted", "oracle", "verdict", "message"),
    [
        (NAN, 1.0, 1.0, "different", "got must be finite, infinite or NaN where trusted is; 1 of 128 elements are not"),
        (INF, 1.0, 1.0, "different", "got must be finite, infinite or NaN where trusted is; 1 of 128 elements are not"),
        (1.0, NAN, NAN, "different", "got must be finite, infinite or NaN where trusted is; 1 of 128 elements are not"),
        (
            INF,
            -INF,
            -INF,
            "different",
            "got must be finite, infinite or NaN where trusted is; 1 of 128 elements are not",
        ),
        (
            1.0,
            NAN,
            1.0,
            "inconclusive",
            "trusted must be finite where the oracle is, and only there; 1 of 128 elements",
        ),
        (
            1.0,
            1.0,
            INF,
            "inconclusive",
            "trusted must be finite where the oracle is, and only there; 1 of 128 elements",
        ),
        (NAN, NAN, NAN, "equal", ""),
        (-INF, -INF, -INF, "equal", ""),
        (INF, INF, 1e300, "equal", ""),
        (NAN, INF, 1e300, "equal", ""),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite(dtype, got, trusted, oracle, verdict, message):
    arrays = [NUMBERS.astype(DTYPES[dtype]), NUMBERS.astype(DTYPES[dtype]), NUMBERS.astype(DTYPES[dtype])]
    arrays[2] = arrays[2].astype(np.float64)
    for array, value in zip(arrays, (got, trusted, oracle), strict=True):
        array[2, 5] = value
    found = parity.as_precise(*arrays)
    assert (found.verdict, found.message[: len(message)]) == (verdict, message)
    assert bool(found.message) == bool(message)
    if message:
        assert found.worst.index == (2, 5)


def test_arrays_that_decide_nothing():
    empty = np.zeros((0, 4), np.float32)
    assert parity.as_precise(empty, empty, empty.astype(np.float64)).message == "the arrays hold no element"
    nan = np.full(100, np.nan, np.float32)
    found = parity.as_precise(nan, nan, nan.astype(np.float64))
    assert (found.verdict, found.message) == (
        "inconclusive",
        "no element is finite in all three, so nothing was compared",
    )
    tiny = (NUMBERS * 1e-39).astype(np.float32)
    found = parity.as_precise(np.zeros_like(tiny), tiny, tiny.astype(np.float64))
    assert found.verdict == "inconclusive"
    assert found.message.endswith("must be above 9.86e-32: smaller ones may be flushed to zero")
    zeros = np.zeros(100, np.float32)
    assert parity.as_precise(zeros, zeros, zeros.astype(np.float64)).verdict == "equal"
    assert parity.as_precise(zeros + np.float32(1e-20), zeros, zeros.astype(np.float64)).verdict == "different"


def test_few_elements_may_be_off_by_chance():
    oracle = np.array(1.5 + 2.0**-25)
    trusted = oracle.astype(np.float32)  # exact up to a quarter of a unit
    off = np.float32(1.5 + 2 * 2.0**-23)
    found = parity.as_precise(off, trusted, oracle)
    assert (found.verdict, found.worst.index) == ("inconclusive", ())
    assert found.message.endswith("which 1 elements may show by chance: give 64 or more")
    assert parity.as_precise(np.float32(1.51), trusted, oracle).verdict == "different"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (NUMBERS, NUMBERS.astype("f4"), NUMBERS),
            ValueError,
            "trusted (float32) must have the dtype of got (float64)",
        ),
        ((NUMBERS.astype("f4"),) * 3, ValueError, "oracle (float32) must be float64"),
        ((NUMBERS, NUMBERS[:4], NUMBERS), ValueError, "trusted [4, 16] must have the shape of got [8, 16]"),
        ((NUMBERS, NUMBERS, NUMBERS[:, :1]), ValueError, "oracle [8, 1] must have the shape of got [8, 16]"),
        ((NUMBERS.astype(int),) * 3, TypeError, "got (int64) must hold floating-point numbers"),
        ((NUMBERS * 1j, NUMBERS, NUMBERS), TypeError, "got (complex128) must hold floating-point numbers"),
        (
            (NUMBERS.astype(ml_dtypes.float8_e5m2),) * 3,
            TypeError,
            "got (float8_e5m2) must be one of float64, float32, bfloat16, float16",
        ),
        (("text", NUMBERS, NUMBERS), TypeError, "got must be an array, got str"),
        ((NUMBERS, None, NUMBERS), TypeError, "trusted must be an array, got NoneType"),
    ],
)
def test_a_refusal_names_the_value_and_the_rule(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        parity.as_precise(*arguments)
    with pytest.raises(ValueError, match=r"^terms \(0\) must be a whole number from 1$"):
        parity.as_precise(NUMBERS, NUMBERS, NUMBERS, terms=0)
    with pytest.raises(TypeError, match=r"^rounds_once \('yes'\) must be True or False$"):
        parity.as_precise(NUMBERS, NUMBERS, NUMBERS, rounds_once="yes")


def test_anything_that_becomes_an_array_is_taken():
    class Wrapped:
        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return self.array

    class Exchanged:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **keywords):
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    wanted = parity.as_precise(NUMBERS.astype("f4"), NUMBERS.astype("f4"), NUMBERS)
    for kind in (Wrapped, Exchanged, lambda array: array.astype(array.dtype.newbyteorder(">"))):
        assert parity.as_precise(kind(NUMBERS.astype("f4")), NUMBERS.astype("f4"), kind(NUMBERS)) == wanted
