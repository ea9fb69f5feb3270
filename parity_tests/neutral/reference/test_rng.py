"""JAX's and torch's random numbers in NumPy, against what the frameworks drew."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import rng
from parity_tests.goldens import random_vectors


def as_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def draw_as_jax(case):
    key = rng.key(case["seed"], x64=case["x64"])
    match case["function"]:
        case "key":
            return key
        case "fold_in":
            return rng.fold_in(key, case["data"])
        case "split":
            return rng.split(key, case["num"])
        case "bits":
            return rng.bits(key, case["shape"], case["dtype"], x64=case["x64"])
        case "uniform":
            bounds = case["minval"], case["maxval"]
            return rng.uniform(key, case["shape"], as_dtype(case["dtype"]), *bounds, x64=case["x64"])
        case "bernoulli":
            return rng.bernoulli(key, case["p"], case["shape"], x64=case["x64"])
    return None


def draw_as_torch(case):
    generator = rng.TorchGenerator(case["seed"])
    match case["function"]:
        case "rand":
            return generator.uniform(case["shape"], as_dtype(case["dtype"]))
        case "uniform":
            return generator.uniform(case["shape"], as_dtype(case["dtype"]), case["low"], case["high"])
        case "bernoulli":
            return generator.bernoulli(case["shape"], case["p"])
        case "randn":
            return generator.normal(case["shape"])
    return None


@pytest.mark.parametrize("computes_float16", [False, True])
def test_numpy_draws_what_jax_drew(computes_float16, monkeypatch):
    monkeypatch.setattr(rng.fused, "COMPUTES_FLOAT16", computes_float16)
    assert random_vectors.check("jax", draw_as_jax) == len(random_vectors.jax_cases()) - len(random_vectors.SEEDS)


def test_numpy_draws_what_torch_drew():
    linear = sum(case["function"] == "linear" for case in random_vectors.torch_cases())
    assert random_vectors.check("torch", draw_as_torch) == len(random_vectors.torch_cases()) - linear


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_stored_vectors_match_their_list_and_name_versions(name):
    document = random_vectors.load(name)
    assert [case["draw"] for case in document["cases"]] == getattr(random_vectors, f"{name}_cases")()
    assert set(document["versions"]) == ({"jax", "flax"} if name == "jax" else {"torch"})


def test_a_changed_stream_is_refused_by_name_and_version():
    with pytest.raises(AssertionError, match=r"the random stream of \{'function': 'key', 'seed': 0.*'jax': '0\.10\.2'"):
        random_vectors.check("jax", lambda case: np.array([1, 1], np.uint32))


def test_threefry_is_that_of_its_paper():
    counters = np.array([0xFFFFFFFF, 0x243F6A88], np.uint32), np.array([0xFFFFFFFF, 0x85A308D3], np.uint32)
    high, low = rng.threefry2x32(np.array([0x13198A2E, 0x03707344], np.uint32), *counters)
    assert (hex(high[1]), hex(low[1])) == ("0xc4923a9c", "0x483df7a0")
    assert rng.threefry_words(0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3) == (0xC4923A9C, 0x483DF7A0)
    assert rng.threefry_words(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF) == (0x1CB996FC, 0xBB002BE7)


def test_a_long_draw_has_the_short_one_in_front():
    key = rng.key(7)
    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        longer = rng.bits(key, 200_001, dtype)  # more than one block
        np.testing.assert_array_equal(rng.bits(key, (3, 7), dtype), longer[:21].reshape(3, 7))
        assert len(np.unique(longer[-100:].astype(np.uint64))) > 50


def test_products_and_sums_are_rounded_once():
    # Their product is 2**-24 * (1 + 2**-46), a little more than halfway from 1 to its neighbour, which float64 hides.
    a, b = np.array([8392705 * 2.0**-35], np.float32), np.array([8384513 * 2.0**-35], np.float32)
    assert np.float32(float(a[0]) * float(b[0]) + 1.0) == 1.0
    assert rng.multiply_add(a, b, np.array([1.0], np.float32))[0] == np.float32(1.0) + np.float32(2.0**-23)
    draws = np.random.default_rng(0).standard_normal((3, 2000))
    for x, y, z, found in zip(*draws, rng.multiply_add(*draws), strict=True):
        assert found == float(Fraction(x) * Fraction(y) + Fraction(z))


@pytest.mark.parametrize("seed", [0, -1, 2**32 + 3, 2**64 - 1])
def test_seeding_again_starts_again(seed):
    generator = rng.TorchGenerator(seed)
    first = generator.normal(5), generator.uniform(3), generator.bernoulli(4)
    generator.normal(3)
    generator.manual_seed(seed)
    for one, other in zip(first, (generator.normal(5), generator.uniform(3), generator.bernoulli(4)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rng.key(1.5), TypeError, r"^seed \(1\.5\) must be an integer$"),
        (lambda: rng.key(True), TypeError, r"^seed \(True\) must be an integer$"),
        (lambda: rng.key(2**63), ValueError, r"^seed \(9223372036854775808\) must be from -2\*\*63 to 2\*\*63 - 1$"),
        (lambda: rng.TorchGenerator(2**64), ValueError, r"^seed \(\d+\) must be from -2\*\*63 to 2\*\*64 - 1$"),
        (lambda: rng.fold_in(rng.key(0), -1), ValueError, r"^data \(-1\) of fold_in must be from 0 to 2\*\*32 - 1$"),
        (lambda: rng.bits(rng.split(rng.key(0), 3)), ValueError, r"^bits takes one key of two words, got .* \(3, 2\)$"),
        (lambda: rng.bits(rng.key(0), 3, "int32"), ValueError, r"^dtype of bits must be an unsigned .*, got int32$"),
        (lambda: rng.bits(rng.key(0), (2, -1)), ValueError, r"^shape \(2, -1\) must not have negative sizes$"),
        (lambda: rng.uniform(rng.key(0), 3, "int32"), ValueError, r"^dtype of uniform must be float16, .* got int32$"),
        (lambda: rng.bernoulli(rng.key(0), 1), TypeError, r"^p of bernoulli must be floating point, got int64$"),
        (lambda: rng.TorchGenerator(0).bernoulli(3, 1.5), ValueError, r"^p \(1\.5\) must be from 0 to 1$"),
        (lambda: rng.TorchGenerator(0).normal(3, "float64"), NotImplementedError, r"in float32 only, got float64$"),
    ],
)
def test_a_bad_argument_is_one_clear_line(call, error, message):
    with pytest.raises(error, match=message):
        call()
