"""Calls of attention, drawn, and how the results of an implementation are held to those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from attn_bridge import masks

FLOAT32 = 3e-6
"""Error allowed beside that of the reference, as part of the largest value: a few units in the last place."""

Options = dict[str, Any]

Results = Callable[[list[np.ndarray], Options, str, str], list[np.ndarray]]
"""Returns context and gradients of a call, in float64, by an implementation in a dtype."""


def rounded(array: Any, dtype: str) -> np.ndarray:
    """Return numbers as a dtype has them, in float64."""
    return np.asarray(array, "float64").astype(getattr(ml_dtypes, dtype, dtype)).astype("float64")


def draw(*shape: int, seed: int) -> np.ndarray:
    """Return numbers drawn from the normal distribution."""
    return np.random.default_rng(seed).normal(size=shape)


def operands(batch=2, queries=70, keys=70, heads=4, key_heads=2, width=8, value_width=8, seed=0) -> list[np.ndarray]:
    """Return query, key and value; they differ in size."""
    shapes = ((queries, heads, width), (keys, key_heads, width), (keys, key_heads, value_width))
    return [draw(batch, *shape, seed=10 * seed + n) * (1.0 + n) for n, shape in enumerate(shapes)]


def some(*shape: int, seed: int, share: float = 0.7) -> np.ndarray:
    """Return a bool array, so much of it True."""
    return np.random.default_rng(seed).random(shape) < share


def numbers(*shape: int, seed: int) -> np.ndarray:
    """Return numbers of documents, negative ones among them."""
    return np.random.default_rng(seed).integers(-2, 3, shape)


def per_head(batch: int, heads: int, queries: int, keys: int, seed: int) -> np.ndarray:
    """Return a mask of its own for every head, with rows that hide every key."""
    mask = some(batch, heads, queries, keys, seed=seed)
    mask[0, 1, 2] = mask[-1, 0, queries - 1] = False
    return mask


def padding(batch: int, keys: int, seed: int) -> np.ndarray:
    """Return a mask of keys; the first sequence has none."""
    mask = some(batch, keys, seed=seed)
    mask[0] = False
    return mask


CASES: dict[str, tuple[Options, Any]] = {
    "no mask": ({}, lambda seed: {}),
    "no mask, odd sizes": ({"queries": 201, "keys": 333}, lambda seed: {}),
    "causal": ({}, lambda seed: {"mask": masks.causal()}),
    "causal, long": ({"queries": 400, "keys": 400, "batch": 1}, lambda seed: {"mask": masks.causal()}),
    "causal, many blocks": (
        {"queries": 1100, "keys": 1100, "batch": 1, "heads": 2, "key_heads": 1},
        lambda seed: {"mask": masks.causal()},
    ),
    "causal, more keys": ({"keys": 300}, lambda seed: {"mask": masks.causal()}),
    "causal, fewer keys": ({"keys": 5}, lambda seed: {"mask": masks.causal()}),
    "causal after cached keys": ({"queries": 5, "keys": 300}, lambda seed: {"mask": masks.causal().offset(295)}),
    "one token after cached keys": ({"queries": 1, "keys": 140}, lambda seed: {"mask": masks.causal().offset(139)}),
    "one token": ({"queries": 1, "keys": 1}, lambda seed: {"mask": masks.causal()}),
    "padding": ({"keys": 300}, lambda seed: {"mask": padding(2, 300, seed)}),
    "one padding for all": ({}, lambda seed: {"mask": some(1, 70, seed=seed)}),
    "causal with padding": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.causal() & padding(2, 300, seed)},
    ),
    "per head": ({"keys": 140}, lambda seed: {"mask": per_head(2, 4, 70, 140, seed)}),
    "per head, all keys": ({}, lambda seed: {"mask": some(1, 4, 70, 1, seed=seed)}),
    "all hidden": ({}, lambda seed: {"mask": np.zeros((1, 1, 1, 1), bool)}),
    "either mask": ({"keys": 140}, lambda seed: {"mask": masks.causal() | padding(2, 140, seed)}),
    "bias": ({"keys": 300}, lambda seed: {"bias": draw(1, 4, 70, 300, seed=seed), "scale": 0.3}),
    "bias of keys, causal": ({}, lambda seed: {"bias": draw(70, seed=seed), "mask": masks.causal()}),
    "bias, per head": ({}, lambda seed: {"bias": draw(2, 1, 70, 70, seed=seed), "mask": per_head(2, 4, 70, 70, seed)}),
    "bias of rows": ({}, lambda seed: {"bias": draw(70, 1, seed=seed), "sinks": draw(4, seed=seed)}),
    "bias that hides": ({}, lambda seed: {"bias": np.where(per_head(2, 4, 70, 70, seed), 0.5, -np.inf)}),
    "wider value": ({"value_width": 12}, lambda seed: {"mask": masks.causal()}),
    "head_dim 1": ({"width": 1, "value_width": 1}, lambda seed: {"mask": masks.causal()}),
    "head_dim 40": ({"width": 40, "value_width": 40}, lambda seed: {"mask": masks.causal()}),
    "head_dim 256": ({"width": 256, "value_width": 256}, lambda seed: {"mask": masks.causal()}),
    "own key heads": ({"key_heads": 4}, lambda seed: {"mask": masks.causal()}),
    "one key head": ({"heads": 6, "key_heads": 1, "queries": 300, "keys": 300}, lambda seed: {"mask": masks.causal()}),
    "window": ({"queries": 400, "keys": 400}, lambda seed: {"mask": masks.sliding_window(37)}),
    "window of one": ({}, lambda seed: {"mask": masks.sliding_window(1)}),
    "window past the keys": ({"queries": 300, "keys": 50}, lambda seed: {"mask": masks.sliding_window(7)}),
    "window with padding": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.sliding_window(7) & padding(2, 300, seed)},
    ),
    "chunks": ({"queries": 300, "keys": 300}, lambda seed: {"mask": masks.chunked(70)}),
    "prefix": ({"queries": 200, "keys": 300}, lambda seed: {"mask": masks.prefix(130), "softcap": 3.0}),
    "chunks or windows": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.chunked(70) | masks.sliding_window(40)},
    ),
    "documents": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.documents(np.sort(numbers(2, 300, seed=seed))) & masks.causal()},
    ),
    "documents in any order, with padding": (
        {"queries": 150, "keys": 130},
        lambda seed: {"mask": masks.documents(numbers(1, 150, seed=seed)) & padding(2, 130, seed)},
    ),
    "two bands": (
        {"queries": 512, "keys": 512, "batch": 1},
        lambda seed: {"mask": masks.sliding_window(7) | masks.sliding_window(9).offset(0, keys=390)},
    ),
    "softcap": ({}, lambda seed: {"softcap": 2.0, "mask": masks.causal(), "bias": draw(4, 1, 70, seed=seed)}),
    "sinks": (
        {},
        lambda seed: {"sinks": 3 * draw(4, seed=seed), "mask": masks.sliding_window(3) & padding(2, 70, seed)},
    ),
}
"""Sizes, and the options of a call for a seed."""


def hold(results: Results, label: str, seed: int, dtype: str, unit: float, name: str) -> None:
    """Hold an implementation to twice the error of the reference, and some units in the last place."""
    sizes, choose = CASES[label]
    inputs, options = [rounded(one, dtype) for one in operands(**sizes, seed=seed)], choose(seed)
    options = {k: rounded(v, dtype) if k in ("bias", "sinks") else v for k, v in options.items()}
    hold_call(results, inputs, options, dtype, unit, name)


def hold_call(
    results: Results,
    inputs: list[np.ndarray],
    options: Options,
    dtype: str,
    unit: float,
    name: str,
    largest: float = 4.0,
) -> None:
    """Hold an implementation to twice the error of the reference in a call, and some units in the last place.

    That is the root of the mean square. The largest of thousands is another in each version of JAX: it is held to
    `largest` times the reference's.
    """
    exact = results(inputs, options, "reference", "float64")
    plain, found = (results(inputs, options, one, dtype) for one in ("reference", name))
    # Gradients of scores cancel, exactly where there is one key only; those of the value don't.
    scale = max(np.abs(one).max() for one in exact)
    for got, want, other in zip(found, exact, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=0.0, atol=largest * np.abs(other - want).max() + unit * scale)
        error, theirs = (float(np.sqrt(np.nanmean(np.square(one - want)))) for one in (got, other))
        assert error <= 2.0 * theirs + unit * scale, f"{error:.2e} where the reference has {theirs:.2e}"
