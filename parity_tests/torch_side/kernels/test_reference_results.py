"""Every implementation computes what the reference does: results, gradients, hidden rows, dropout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_bridge import masks
from attn_bridge.reference.attention import attend as formula
from torch_attn import functional
from torch_attn.implementations import by_rows

from .attention_calls import Options, all_options, draw, operands, some, supported, to

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Dtype -> error allowed beside that of the reference, as part of the largest value: a few units in the last place."""


def per_head(batch: int, heads: int, queries: int, keys: int, seed: int) -> Tensor:
    """Return a mask of its own for every head, with rows that hide every key."""
    mask = some(batch, heads, queries, keys, seed=seed)
    mask[0, 1, 2] = mask[-1, 0, queries - 1] = False
    return mask


CASES: dict[str, tuple[Options, Any]] = {
    "no mask": ({}, lambda seed: {}),
    "causal": ({}, lambda seed: {"mask": masks.causal()}),
    "causal, more keys": ({"keys": 14}, lambda seed: {"mask": masks.causal()}),
    "causal, fewer keys": ({"keys": 5}, lambda seed: {"mask": masks.causal()}),
    "causal after cached keys": ({"queries": 5, "keys": 14}, lambda seed: {"mask": masks.causal().offset(9)}),
    "one token after cached keys": ({"queries": 1, "keys": 14}, lambda seed: {"mask": masks.causal().offset(13)}),
    "one token": ({"queries": 1, "keys": 1}, lambda seed: {"mask": masks.causal()}),
    "no queries": ({"queries": 0}, lambda seed: {"mask": masks.causal()}),
    "padding": ({}, lambda seed: {"mask": some(2, 9, seed=seed)}),
    "causal with padding": ({}, lambda seed: {"mask": masks.causal() & some(2, 9, seed=seed)}),
    "per head": ({}, lambda seed: {"mask": per_head(2, 4, 9, 9, seed)}),
    "all hidden": ({}, lambda seed: {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}),
    "bias": ({}, lambda seed: {"bias": draw(1, 4, 9, 9, seed=seed), "scale": 0.3}),
    "bias of keys, causal": ({}, lambda seed: {"bias": draw(9, seed=seed), "mask": masks.causal()}),
    "bias, per head": ({}, lambda seed: {"bias": draw(2, 1, 9, 9, seed=seed), "mask": per_head(2, 4, 9, 9, seed)}),
    "bias that hides": ({}, lambda seed: {"bias": torch.where(per_head(2, 4, 9, 9, seed), 0.5, -torch.inf)}),
    "wider value": ({"value_width": 12}, lambda seed: {"mask": masks.causal()}),
    "narrower value": ({"value_width": 3}, lambda seed: {"mask": some(2, 9, seed=seed)}),
    "head_dim 1": ({"width": 1, "value_width": 1}, lambda seed: {"mask": masks.causal()}),
    "head_dim 40": ({"width": 40, "value_width": 40}, lambda seed: {"mask": masks.causal()}),
    "head_dim 256": ({"width": 256, "value_width": 256}, lambda seed: {"mask": masks.causal()}),
    "own key heads": ({"key_heads": 4}, lambda seed: {"mask": masks.causal()}),
    "long": ({"queries": 300, "keys": 300}, lambda seed: {"mask": masks.causal()}),
    "window": ({"queries": 90, "keys": 90}, lambda seed: {"mask": masks.sliding_window(7)}),
    "window of one": ({"queries": 70, "keys": 70}, lambda seed: {"mask": masks.sliding_window(1)}),
    "window and causal": (
        {"queries": 90, "keys": 90, "batch": 1},
        lambda seed: {"mask": masks.causal() & masks.sliding_window(40)},
    ),
    "window with padding": (
        {"queries": 90, "keys": 90},
        lambda seed: {"mask": masks.sliding_window(7) & some(2, 90, seed=seed, share=0.3)},
    ),
    "window with one padding for all": (
        {"queries": 90, "keys": 90},
        lambda seed: {"mask": some(1, 90, seed=seed) & masks.sliding_window(7)},
    ),
    "window with masks per head": (
        {"queries": 60, "keys": 60},
        lambda seed: {"mask": masks.sliding_window(7) & per_head(2, 4, 60, 60, seed)},
    ),
    "window after cached keys": (
        {"queries": 5, "keys": 99, "value_width": 5},
        lambda seed: {"mask": masks.sliding_window(7).offset(94)},
    ),
    "window, one token": ({"queries": 1, "keys": 80}, lambda seed: {"mask": masks.sliding_window(9).offset(50)}),
    "window past the keys": ({"queries": 90, "keys": 50}, lambda seed: {"mask": masks.sliding_window(7)}),
    "window before the keys": (
        {"queries": 90, "keys": 90},
        lambda seed: {"mask": masks.sliding_window(7).offset(-20)},
    ),
    "window as wide as the keys": ({}, lambda seed: {"mask": masks.sliding_window(9)}),
    "either mask": ({}, lambda seed: {"mask": masks.causal() | some(2, 9, seed=seed)}),
    "softcap": ({}, lambda seed: {"softcap": 2.0, "mask": masks.causal()}),
    "sinks": ({}, lambda seed: {"sinks": draw(4, seed=seed), "mask": masks.sliding_window(3)}),
}
"""Sizes, and the options of a call for a seed."""
WITH_ROWS: dict[str, tuple[Options, Any]] = {
    "softcap and sinks": ({}, lambda seed: {"softcap": 2.0, "sinks": draw(4, seed=seed), "mask": masks.causal()}),
    "sinks that hide rows": (
        {},
        lambda seed: {"sinks": draw(4, seed=seed), "mask": masks.causal() & per_head(2, 4, 9, 9, seed)},
    ),
    "bias and softcap": ({}, lambda seed: {"softcap": 2.0, "bias": draw(4, 9, 1, seed=seed), "mask": masks.prefix(5)}),
    "bias that hides rows, causal": (
        {},
        lambda seed: {"bias": torch.where(per_head(2, 4, 9, 9, seed), 0.5, -torch.inf), "mask": masks.causal()},
    ),
    "chunks": ({"queries": 14, "keys": 17}, lambda seed: {"mask": masks.chunked(5), "softcap": 3.0}),
    "documents": ({}, lambda seed: {"mask": masks.documents(IDS) & masks.causal(), "softcap": 3.0}),
    "hidden before all keys": ({}, lambda seed: {"mask": masks.causal().offset(-3), "sinks": draw(4, seed=seed)}),
}
"""Calls that make `by_rows` work, beside those of `CASES`."""
IDS = [[0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 5, 5, 5, 5]]
FIRST = {
    **dict.fromkeys(CASES, "sdpa"),
    **{name: "windowed" for name in CASES if name.startswith("window")},
    "window with masks per head": "sdpa",
    "window as wide as the keys": "sdpa",
    "softcap": "by_rows",
    "sinks": "by_rows",
}
"""Which implementation a CPU picks, for calls this small."""


def make(label: str, seed: int) -> tuple[list[Tensor], Options]:
    sizes, options = CASES[label]
    return operands(**sizes, seed=seed), options(seed)


def results(inputs: list[Tensor], options: Options, name: str | None) -> list[Tensor]:
    """Return the context and the gradients of every float array."""
    context = functional.dot_product_attention(*inputs, **options, implementation=name)
    sources = [*inputs, *(value for value in options.values() if isinstance(value, Tensor) and value.requires_grad)]
    cotangent = draw(*context.shape, seed=99).to(context.dtype)
    return [context.detach(), *torch.autograd.grad(context, sources, cotangent)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("label", CASES)
def test_every_implementation_matches_the_reference(label, dtype):
    for seed in (0, 1):
        inputs, options = make(label, seed)
        low = to(dtype, inputs, options)
        wide = to(torch.float64, *low)
        exact, plain = results(*wide, "reference"), results(*low, "reference")
        names = supported(*low)
        assert names[0] == FIRST[label]
        for name in names:
            hold(results(*low, name), exact, plain, DTYPES[dtype])


def hold(found: list[Tensor], exact: list[Tensor], plain: list[Tensor], unit: float) -> None:
    """Hold results to twice the error of the reference, and some units in the last place."""
    # Gradients of scores cancel, exactly where there is one key only; those of the value don't.
    scale = max(one.abs().max().item() for one in exact if one.numel())
    for got, want, other in zip(found, exact, plain, strict=True):
        assert got.dtype == other.dtype
        assert got.shape == other.shape
        allowed = 2.0 * (other.double() - want).abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got.double(), want, rtol=0.0, atol=allowed + unit * scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 200])
@pytest.mark.parametrize("label", [*(label for label in CASES if label != "no queries"), *WITH_ROWS])
def test_blocks_of_rows_match_the_reference(label, rows, dtype, monkeypatch):
    monkeypatch.setattr(by_rows, "MAX_ROWS", rows)
    sizes, options = {**CASES, **WITH_ROWS}[label]
    low = to(dtype, operands(**sizes), options(0))
    exact, plain = results(*to(torch.float64, *low), "reference"), results(*low, "reference")
    hold(results(*low, "by_rows"), exact, plain, DTYPES[dtype])


@pytest.mark.parametrize("label", ["causal", "causal with padding", "per head", "wider value", "window with padding"])
def test_every_implementation_computes_the_formula(label):
    for seed in (0, 1):
        (query, key, value), options = make(label, seed)
        groups = query.shape[2] // key.shape[2]
        arrays = [query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)]
        positions = torch.arange(query.shape[1])
        mask = masks.as_mask(options["mask"]).allowed(positions[:, None], positions[None, :])
        mask = mask.expand(2, 4, query.shape[1], key.shape[1]).numpy()
        heads_first = [array.transpose(1, 2).numpy() for array in arrays]
        want, _ = formula(*heads_first, scale=query.shape[-1] ** -0.5, causal=False, attention_mask=mask)
        for name in supported([query, key, value], options):
            got = functional.dot_product_attention(query, key, value, **options, implementation=name)
            np.testing.assert_allclose(got.transpose(1, 2), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "label", ["per head", "all hidden", "bias, per head", "bias that hides", "window past the keys"]
)
def test_hidden_rows_give_zeros_without_gradient(label, dtype):
    inputs, options = to(dtype, *make(label, 0))
    call = functional._checked(*inputs, **all_options(options))
    bias = call.bias
    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool) if call.mask is None else call.allowed()
    visible = allowed if bias is None else allowed & (bias > -torch.inf)
    hidden = ~visible.expand(call.scores_shape).any(-1).transpose(1, 2)
    assert hidden.any()
    for name in supported(inputs, options):
        context, of_query, *others = results(inputs, options, name)
        assert not context[hidden].any()
        assert not of_query[hidden].any()
        assert all(torch.isfinite(gradient).all() for gradient in (context, of_query, *others))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("label", ["causal", "per head", "bias", "window", "wider value"])
def test_scores_of_ten_thousand_give_no_nan(label, dtype):
    (query, key, value), options = make(label, 0)
    inputs, options = to(dtype, [query * 1e4, key, value], options)
    for name in supported(inputs, options):
        assert all(torch.isfinite(one).all() for one in results(inputs, options, name))


@pytest.mark.parametrize("label", ["causal", "padding", "window"])
def test_strides_do_not_matter(label):
    inputs, options = make(label, 0)
    odd = [array.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for array in inputs]
    assert all(array.stride(-1) != 1 for array in odd)
    for name in supported(inputs, options):
        for got, want in zip(
            results(*to(torch.float64, odd, options), name),
            results(*to(torch.float64, inputs, options), name),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_kernels_dropout_matches_the_references(dtype):
    inputs, options = to(dtype, operands(), {"mask": masks.causal(), "dropout": 0.4})
    found = []
    for name in ("sdpa", "reference"):
        torch.manual_seed(3)
        found.append(functional.dot_product_attention(*inputs, **options, implementation=name))
    torch.testing.assert_close(*found)
    assert (functional.dot_product_attention(*inputs, **options) - found[0]).abs().max() > 0.1


@pytest.mark.parametrize("scale", [-0.3, -1e-30, 0.0, 1e-300])  # the last is 0 in float32
@pytest.mark.parametrize("queries", [5, 70])
def test_scales_of_zero_and_below_hide_the_same_keys(scale, queries):
    inputs = to(torch.float32, operands(queries=queries, keys=queries), {})[0]
    options = {"mask": masks.causal(), "scale": scale}
    for got, want in zip(results(inputs, options, None), results(inputs, options, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_masks_of_few_axes_go_with_windows():
    inputs = operands(queries=130, keys=130)
    for mask in (some(130, seed=0), some(1, seed=1), torch.ones((), dtype=torch.bool)):
        options = {"mask": masks.sliding_window(5) & mask}
        got, want = (
            functional.dot_product_attention(*inputs, **options, implementation=n) for n in (None, "reference")
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mask", [masks.causal(), masks.sliding_window(5)])
def test_operands_of_two_dtypes_are_served(mask):
    query, key, value = operands(queries=80, keys=80)
    context = functional.dot_product_attention(query.float(), key, value, mask=mask)
    assert context.dtype == torch.float32
    bias = draw(80, 80, seed=3)
    context = functional.dot_product_attention(query.float(), key.float(), value.float(), mask=mask, bias=bias)
    assert context.isfinite().all()
