"""Kernels that multiply bfloat16 in pairs compute what the reference does, on processors without such products too."""

from __future__ import annotations

import importlib.util

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import masks
from parity_tests.contract.backends import adapters, called, fixture
from parity_tests.support.calls import cover
from parity_tests.support.calls.attention_calls import draw, hold, hold_call, operands, rounded, some

from .test_cpu_flash import SERVED

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the extra cpu is not installed", allow_module_level=True)

from attn_kernels.compiler import processor

UNIT = float(ml_dtypes.finfo("bfloat16").eps)

FOUND = adapters("calls", __package__)

backend = fixture(FOUND)


@pytest.fixture(scope="module", autouse=True)
def _in_pairs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "pairs", lambda: "any")
        for adapter in FOUND.values():
            adapter.forget()
        yield
    for adapter in FOUND.values():
        adapter.forget()


MULTIPLIED = (
    *("no mask, odd sizes", "causal, long", "causal, fewer keys", "one token", "causal with padding", "per head"),
    *("all hidden", "bias, per head", "wider value", "head_dim 1", "head_dim 40", "head_dim 256", "one key head"),
    *("window with padding", "documents", "softcap", "sinks"),
)
"""Cases whose products differ in shape, or in what is done to their results."""


@cover.some(
    "label", SERVED, called(FOUND, MULTIPLIED, ("causal with padding", "bias, per head", "sinks", "wider value"))
)
def test_it_matches_the_reference(backend, label):
    hold(backend.results, label, 1, "bfloat16", UNIT, "cpu_flash")


@cover.some("seed", range(12), called(FOUND, (0, 1, 4, 7, 11), (1,)))
def test_any_sizes_will_do(backend, seed, monkeypatch):
    """Sizes that are no multiples of a block, a tile or a register, windows and offsets on either side of the keys."""
    if seed % 2:
        monkeypatch.setattr(processor, "pairs", lambda: "any16")
    draw_size = np.random.default_rng(700 + seed)
    key_heads, group = draw_size.integers(1, 4, 2)
    queries, keys = draw_size.integers(17, 330, 2)
    width, value_width = draw_size.integers(1, 140, 2)
    batch, heads = 1 + seed % 2, key_heads * group
    inputs = [
        rounded(one, "bfloat16") for one in operands(batch, queries, keys, heads, key_heads, width, value_width, seed)
    ]
    band = masks.sliding_window(int(draw_size.integers(1, 200))) if seed % 3 else masks.causal()
    options = {"mask": band.offset(int(draw_size.integers(-60, 200)))} if seed % 4 else {}
    if seed % 2:
        array = some(batch, 1, queries, keys, seed=seed)
        options["mask"] = options["mask"] & array if "mask" in options else array
    if seed % 3 == 1:
        options["bias"] = rounded(draw(heads, queries, keys, seed=seed), "bfloat16")
    if seed % 5 == 1:
        options["softcap"] = float(draw_size.uniform(0.5, 4.0))
    hold_call(backend.results, inputs, options, "bfloat16", UNIT, "cpu_flash")


OPTIONS = [{}, {"mask": masks.causal()}, {"mask": masks.sliding_window(100)}]


@cover.some("options", OPTIONS, called(FOUND, OPTIONS, OPTIONS[2:]))
def test_many_blocks_of_odd_sizes(backend, options):
    inputs = [rounded(one, "bfloat16") for one in operands(1, 777, 777, 4, 2, 80, 48, seed=3)]
    hold_call(backend.results, inputs, options, "bfloat16", UNIT, "cpu_flash")


@cover.some("place", range(3), called(FOUND, range(3), [1]))
def test_a_common_part_costs_no_precision(backend, place):
    inputs = operands(1, 1025, 1025, 2, 1, 32, 32, seed=5)
    inputs = [rounded(one + 4.0 * (n == place), "bfloat16") for n, one in enumerate(inputs)]
    hold_call(backend.results, inputs, {}, "bfloat16", UNIT, "cpu_flash")


def test_query_gradients_do_not_contain_the_keys_common_part(backend):
    """The gradients of a row's scores have a sum of 0, which rounding them would change."""
    inputs = operands(1, 300, 300, 2, 1, 32, 32, seed=7)
    inputs = [rounded(one + 24.0 * (n == 1), "bfloat16") for n, one in enumerate(inputs)]
    want = backend.results(inputs, {}, "reference", "float64")[1]
    found = backend.results(inputs, {}, "cpu_flash", "bfloat16")[1]
    np.testing.assert_allclose(found, want, rtol=0, atol=UNIT * np.abs(want).max())


@cover.some("place", range(3), called(FOUND, range(3), [2]))
def test_nan_reaches_only_rows_that_see_it(backend, place):
    inputs = operands(queries=140, keys=140, batch=1)
    inputs[place][0, 70, 1, 3] = np.nan
    found, want = (
        np.isnan(backend.attend(*inputs, name=name, dtype="bfloat16", mask=masks.causal()))
        for name in ("cpu_flash", "reference")
    )
    must = np.zeros_like(want)
    heads = [1] if place == 0 else [2, 3]  # of the second key head
    rows = slice(70, 71) if place == 0 else slice(70, None)
    must[:, rows, heads] = np.arange(8) == 3 if place == 2 else True
    assert found[must].all()
    assert not found[~want].any(), "no more than in the reference"


def test_hidden_keys_may_hold_anything(backend):
    """As the slots of a cache that nothing was written to."""
    inputs = operands(1, 70, 150, 2, 1, seed=6)
    mask = masks.sliding_window(30).offset(50)
    want = backend.results(inputs, {"mask": mask}, "cpu_flash", "bfloat16")
    for slots in (slice(0, 21), slice(120, None)):
        for array in inputs[1:]:
            array[:, slots] = np.nan
    found = backend.results(inputs, {"mask": mask}, "cpu_flash", "bfloat16")
    for got, wanted in zip(found, want, strict=True):
        assert np.isfinite(wanted).all()
        np.testing.assert_array_equal(got, wanted)


def test_gradients_with_dropout_are_those_of_the_reference(backend):
    inputs = [rounded(one, "bfloat16") for one in operands(queries=150, keys=140)]
    for options in ({}, {"mask": masks.causal(), "sinks": rounded(draw(4, seed=3), "bfloat16")}):
        found, want = (
            backend.results(inputs, {**options, "dropout": 0.4, "rng": backend.source(5)}, name, dtype)
            for name, dtype in (("cpu_flash", "bfloat16"), ("reference", "float32"))
        )
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * UNIT * np.abs(wanted).max())
