"""The kernels for processors compute what the reference does, whichever framework calls them."""

from __future__ import annotations

import importlib.util

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import masks
from parity_tests.contract.backends import adapters, called, fixture
from parity_tests.support.calls import cover
from parity_tests.support.calls.attention_calls import CASES, FLOAT32, draw, hold, hold_call, operands, rounded, some

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="the extra cpu is not installed")

FOUND = adapters("calls", __package__)

backend = fixture(FOUND)

SERVED = [label for label in CASES if label not in ("either mask", "two bands", "bias of rows")]
"""Cases of `attention_calls` that the kernels serve."""

DESCRIBED = (
    *("no mask, odd sizes", "causal, more keys", "causal with padding", "per head", "all hidden", "bias, per head"),
    *("wider value", "one key head", "window with padding", "prefix", "documents in any order, with padding"),
    *("softcap", "sinks"),
)
"""Cases that are described to the kernels in every way."""


@cover.some("label", SERVED, called(FOUND, SERVED, DESCRIBED))
def test_it_matches_the_reference(backend, label):
    for seed in (0, 1):
        hold(backend.results, label, seed, "float32", FLOAT32, "cpu_flash")


@cover.rotated(
    ("label", "dtype"),
    ["no mask, odd sizes", "causal, long", "one key head", "window", "head_dim 40", "softcap", "bias, per head"],
    ["bfloat16", "float16"],
)
def test_it_matches_the_reference_in_16_bits(backend, label, dtype):
    hold(backend.results, label, 0, dtype, float(ml_dtypes.finfo(dtype).eps), "cpu_flash")


@cover.some("seed", range(16), called(FOUND, range(0, 16, 3), (0, 3, 9)))
def test_any_sizes_will_do(backend, seed):
    """Sizes that are no multiples of a block, a tile or a register, windows and offsets on either side of the keys."""
    draw_size = np.random.default_rng(500 + seed)
    key_heads, group = draw_size.integers(1, 4, 2)
    queries, keys = draw_size.integers(1, 260, 2)
    width, value_width = draw_size.integers(1, 90, 2)
    inputs = operands(1 + seed % 2, queries, keys, key_heads * group, key_heads, width, value_width, seed)
    band = masks.sliding_window(int(draw_size.integers(1, 200))) if seed % 3 else masks.causal()
    options = {"mask": band.offset(int(draw_size.integers(-60, 200))), "sinks": draw(key_heads * group, seed=seed)}
    options = options if seed % 4 else {}
    sizes = (1 + seed % 2, key_heads * group, queries, keys)
    of_array, of_bias = (
        [size if whole else 1 for size, whole in zip(sizes, axes, strict=True)]
        for axes in draw_size.random((2, 4)) < 0.6
    )
    array = some(*of_array, seed=seed)
    if seed % 3 == 1:
        options["bias"] = draw(*of_bias[:-1], keys, seed=seed)
    if seed % 5 == 1:
        options["softcap"] = float(draw_size.uniform(0.5, 4.0))
    if seed % 2:
        options["mask"] = options["mask"] & array if "mask" in options else array
    hold_call(backend.results, inputs, options, "float32", FLOAT32, "cpu_flash")


@cover.some("softcap", [1e-3, 0.7, 50.0, 1e6, 1e34], called(FOUND, [1e-3, 0.7, 50.0, 1e6, 1e34], [0.7]))
def test_caps_of_any_size(backend, softcap):
    """Where little is capped the tangent is nearly its argument, where much is it is one: neither loses precision."""
    inputs, options = operands(queries=140, keys=140, seed=3), {"softcap": softcap, "scale": 1.0}
    hold_call(backend.results, inputs, options, "float32", FLOAT32, "cpu_flash")


def test_scores_at_the_cap_pass_no_gradient_back(backend):
    """One minus the square of a rounded tangent would be some 1e-7, which large queries and keys multiply."""
    inputs = [np.abs(one) + 1.0 for one in operands(queries=140, keys=140, seed=3)]
    inputs = [*(2e3 * one for one in inputs[:2]), inputs[2]]
    _, *of_scores, _ = backend.results(inputs, {"softcap": 1e5, "scale": 1.0}, "cpu_flash", "float32")
    assert not any(one.any() for one in of_scores)


@cover.rotated(("dtype", "tokens", "common", "heads"), [("float32", 200, 30.0), ("bfloat16", 2049, 4.0)], [1, 2])
def test_bias_gradients_keep_precision_with_a_common_key_part(backend, dtype, tokens, common, heads):
    """Nor where heads share it, and another implementation computes its gradient."""
    inputs = operands(1, tokens, tokens, 2, 2, seed=5)
    inputs = [rounded(one + common * (n > 0), dtype) for n, one in enumerate(inputs)]
    bias = rounded(draw(1, heads, tokens, tokens, seed=6), dtype)
    unit = float(ml_dtypes.finfo(dtype).eps)
    hold_call(backend.results, inputs, {"bias": bias}, dtype, unit, "cpu_flash", largest=8.0)  # a few rows have it all


@cover.rotated(("dtype", "place"), ["float32", "bfloat16", "float16"], range(3))
def test_nan_reaches_only_rows_that_see_it(backend, dtype, place):
    inputs = operands(queries=140, keys=140, batch=1)
    inputs[place][0, 70, 1, 3] = np.nan
    found, want = (
        np.isnan(backend.attend(*inputs, name=name, dtype=dtype, mask=masks.causal()))
        for name in ("cpu_flash", "reference")
    )
    must = np.zeros_like(want)
    heads = [1] if place == 0 else [2, 3]  # of the second key head
    rows = slice(70, 71) if place == 0 else slice(70, None)
    must[:, rows, heads] = np.arange(8) == 3 if place == 2 else True
    assert found[must].all()
    assert not found[~want].any(), "no more than in the reference"


@pytest.mark.parametrize("rate", [0.001, 0.3, 0.999])
def test_dropout_keeps_the_weights_that_the_reference_keeps(backend, rate):
    """With values that name their key and all weights alike, the context tells which were kept."""
    query = np.zeros((2, 130, 3, 8))
    value = np.broadcast_to(np.eye(130)[None, :, None], (2, 130, 3, 130))
    found, want = (
        backend.attend(query, query, value, name=name, dropout=rate, rng=backend.source(5))
        for name in ("cpu_flash", "reference")
    )
    np.testing.assert_array_equal(found > 0, want > 0)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_gradients_with_dropout_are_those_of_the_reference(backend):
    inputs = operands(queries=150, keys=140)
    for options in ({}, {"mask": masks.causal(), "sinks": draw(4, seed=3)}):
        found, want = (
            backend.results(inputs, {**options, "dropout": 0.4, "rng": backend.source(5)}, name, "float32")
            for name in ("cpu_flash", "reference")
        )
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
