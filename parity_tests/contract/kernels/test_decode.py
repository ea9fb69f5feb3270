"""The kernel for few queries computes what the reference does, whichever framework calls it."""

from __future__ import annotations

import importlib.util

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import masks
from attn_kernels import words
from parity_tests.contract.backends import adapters, called, fixture
from parity_tests.support.calls import cover
from parity_tests.support.calls.attention_calls import FLOAT32, draw, hold_call, operands, padding, rounded, some

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="the extra cpu is not installed")

FOUND = adapters("calls", __package__)

backend = fixture(FOUND)


def hidden_rows(batch: int, heads: int, queries: int, keys: int) -> np.ndarray:
    """Return a mask of its own for every head that hides all keys from some, and whole blocks of keys from all."""
    mask = some(batch, heads, queries, keys, seed=3)
    mask[0, 0, 0] = mask[-1, -1, -1] = False
    mask[..., 64:256] = False
    return mask


CASES = {
    "one token": ({"queries": 1, "keys": 300}, {"mask": masks.causal().offset(299)}),
    "one key": ({"queries": 1, "keys": 1}, {}),
    "a window": ({"queries": 1, "keys": 700}, {"mask": masks.sliding_window(130).offset(650)}),
    "a window that ends before the keys": ({"queries": 5, "keys": 400}, {"mask": masks.sliding_window(9).offset(300)}),
    "all hidden": ({"queries": 2, "keys": 300}, {"mask": np.zeros((1, 1, 1, 300), bool)}),
    "one mask of all keys": ({"queries": 3, "keys": 300}, {"mask": some(2, 4, 3, 1, seed=1)}),
    "hidden rows": ({"queries": 3, "keys": 390}, {"mask": hidden_rows(2, 4, 3, 390)}),
    "hidden rows, sinks": ({"queries": 3, "keys": 390}, {"mask": hidden_rows(2, 4, 3, 390), "sinks": draw(4, seed=2)}),
    "padding": ({"queries": 2, "keys": 300}, {"mask": masks.causal().offset(298) & padding(2, 300, 1)}),
    "documents": (
        {"queries": 16, "keys": 200},
        {"mask": masks.documents(np.arange(200)[None] // 7 % 3) & masks.causal().offset(184)},
    ),
    "bias, softcap": ({"queries": 3, "keys": 300}, {"bias": draw(4, 1, 300, seed=1), "softcap": 2.0}),
    "a bias that hides": ({"queries": 3, "keys": 390}, {"bias": np.where(hidden_rows(2, 4, 3, 390), 0.5, -np.inf)}),
    "groups of seven": ({"queries": 1, "keys": 513, "heads": 14, "width": 64, "value_width": 64}, {}),
    "one head of keys, as of a latent": (
        {"queries": 2, "keys": 300, "heads": 12, "key_heads": 1, "width": 72, "value_width": 72},
        {},
    ),
    "sixteen queries": ({"queries": words.FEW, "keys": 300, "width": 40}, {"mask": masks.causal().offset(284)}),
}


DESCRIBED = ("a window", "hidden rows, sinks", "documents", "bias, softcap", "groups of seven", "sixteen queries")
"""Cases that are described to the kernel in every way."""


def hold_case(backend, label, dtype):
    sizes, options = CASES[label]
    inputs = [rounded(one, dtype) for one in operands(**sizes, seed=4)]
    options = {k: rounded(v, dtype) if k in ("bias", "sinks") else v for k, v in options.items()}
    unit = FLOAT32 if dtype == "float32" else float(ml_dtypes.finfo(dtype).eps)
    hold_call(backend.results, inputs, options, dtype, unit, "cpu_flash")


@cover.some("label", list(CASES), called(FOUND, CASES, DESCRIBED))
def test_it_matches_the_reference(backend, label):
    hold_case(backend, label, "float32")


@cover.rotated(
    ("label", "dtype"),
    list(CASES),
    ["bfloat16", "float16"],
    always=called(FOUND, CASES, ("one token", "bias, softcap")),
)
def test_it_matches_the_reference_in_16_bits(backend, label, dtype):
    hold_case(backend, label, dtype)


@cover.some("seed", range(16), called(FOUND, (1, 4, 6, 7, 11, 15), (4, 7)))
def test_any_sizes_will_do(backend, seed):
    size = np.random.default_rng(900 + seed)
    key_heads, group = size.integers(1, 4), size.integers(1, 8)
    queries, keys = size.integers(1, words.FEW + 1), size.integers(1, 700)
    width, value_width = (8 * size.integers(1, 12, 2)) if seed % 2 else size.integers(1, 90, 2)
    inputs = operands(1 + seed % 2, queries, keys, key_heads * group, key_heads, width, value_width, seed)
    band = masks.sliding_window(int(size.integers(1, 300))) if seed % 3 else masks.causal()
    options = {"mask": band.offset(int(size.integers(-8, 700)))}
    if seed % 4:
        options["sinks"] = draw(key_heads * group, seed=seed)
    if seed % 5 == 1:
        options["softcap"] = float(size.uniform(0.5, 4.0))
    if seed % 3 == 1:
        options["bias"] = draw(queries, keys, seed=seed)
    if seed % 2:
        whole = size.random(3) < 0.6
        axes = (1 + seed % 2, key_heads * group, queries)
        options["mask"] &= some(*(one if kept else 1 for one, kept in zip(axes, whole, strict=True)), keys, seed=seed)
    hold_call(backend.results, inputs, options, "float32", FLOAT32, "cpu_flash")


@cover.rotated(("dtype", "place"), ["float32", "bfloat16", "float16"], range(3))
def test_nan_reaches_only_rows_that_see_it(backend, dtype, place):
    inputs = operands(queries=3, keys=300, batch=1)
    inputs[place][0, 1 if place == 0 else 298, 1, 3] = np.nan
    found, want = (
        np.isnan(backend.attend(*inputs, name=name, dtype=dtype, mask=masks.causal().offset(297)))
        for name in ("cpu_flash", "reference")
    )
    must = np.zeros_like(want)
    heads = [1] if place == 0 else [2, 3]  # of the second key head
    must[:, 1 : 2 if place == 0 else None, heads] = np.arange(8) == 3 if place == 2 else True
    assert found[must].all()
    assert not found[~want].any(), "no more than in the reference"


def test_scores_that_differ_widely_between_parts_of_the_keys(backend):
    """The largest score of a part is far from that of another: what was summed under it all but vanishes, or rules."""
    query, key, value = operands(1, 1, 1200, 2, 1)
    key[:, 700] *= 90.0
    hold_call(backend.results, [query, key, value], {"scale": 1.0}, "float32", FLOAT32, "cpu_flash")


@pytest.mark.parametrize("queries", [1, words.FEW])
def test_a_single_key_with_all_the_weight_leaves_no_gradient_of_large_scores(backend, queries):
    """Scores near 1e5 are rounded by 1e-2; a sum of weights that were rounded elsewhere would not cancel that."""
    query, key, value = operands(1, queries, 5, width=64)
    inputs = [100.0 * query, 100.0 * key, value]
    scores = np.sort(np.einsum("bthgc,bshc->bhgts", inputs[0].reshape(1, queries, 2, 2, 64), inputs[1]) / 8.0)
    assert (scores[..., -1] - scores[..., -2]).min() > 100.0
    _, d_query, d_key, _ = backend.results(inputs, {}, "cpu_flash", "float32")
    assert np.abs(d_query).max() < 1e-4
    assert np.abs(d_key).max() < 1e-4
