"""Loads the golden values of chapter 3 and of the norms, and compares results; imports no framework."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

ROUNDING = 1e-6
"""What a result may be off beside the rounding of the printed value, on another backend than the book's."""

KNOWN: dict[str, tuple[Any, ...]] = {
    "variant": (
        "plain_dot_product",
        "manual_projection",
        "SelfAttention_v1",
        "SelfAttention_v2",
        "CausalAttention",
        "MultiHeadAttentionWrapper",
        "MultiHeadAttention",
        "sum_of_printed_row",
        "lower_triangular_ones",
        "dropout_of_ones",
        "array_shape",
        "per_head_self_product",
    ),
    "steps.method": ("coordinate_loop", "dot", "dot_loop", "matmul"),
    "steps.mask": (None, "zero_above_diagonal", "minus_inf_above_diagonal"),
    "steps.scale": (None, "sqrt_key_dim"),
    "steps.normalise": (None, "divide_by_sum", "softmax_unshifted", "softmax"),
    "steps.renormalise_rows": (False, True),
    "dropout.rate": (0.0, 0.5),
    "dropout.mode": ("train",),
    "dropout.seed": (None, 123),
    "dropout.keep_mask": (None, "dropout_keep_mask"),
    "heads.count": (2,),
    "heads.head_dim": (1, 2),
    "heads.combine": ("concatenate_last_axis", "contiguous_feature_slices"),
    "heads.out_proj": (False, True),
    "returns.quantity": (
        "queries",
        "keys",
        "values",
        "scores",
        "weights",
        "context",
        "mask",
        "dropped",
        "batch",
        "scalar",
    ),
    "returns.row": (None, 0, 1),
    "returns.col": (None, 0, 1),
    "returns.then": (None, "sum", "sum_last_axis", "shape"),
}
"""Field of a recipe -> the values that the interpreter in `parity_tests.twins.test_goldens` understands."""

ARGUMENTS = ("constructor", "draws", "entry", "head", "parameters", "row", "seed")
"""Fields of a recipe that hold data, not a choice of what to do."""


@functools.cache
def load() -> dict[str, Any]:
    """Return the whole of ``chapter3.json``; do not change it."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("chapter3.json").read_text(encoding="utf-8"))
    return document


@functools.cache
def norms() -> list[dict[str, Any]]:
    """Return the entries of ``norms.json``: a norm's arguments, parameters, input and output; do not change them."""
    text = Path(__file__).with_name("norms.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)["entries"]
    return entries


def check_known(entry: dict[str, Any]) -> None:
    """Refuse an entry whose recipe says something that the interpreter does not understand.

    Raises:
        ValueError: a field or a value outside `KNOWN`, or rows renormalised without having been zeroed.
    """
    for field, value in _flatten(entry["recipe"]):
        if field.split(".")[0] in ARGUMENTS:
            continue
        if field not in KNOWN:
            raise ValueError(f"{entry['id']}: recipe field {field} is unknown")
        if value not in KNOWN[field]:
            raise ValueError(f"{entry['id']}: {field} ({value}) must be one of {', '.join(map(str, KNOWN[field]))}")
    steps = entry["recipe"].get("steps")
    if steps and steps["renormalise_rows"] and steps["mask"] != "zero_above_diagonal":
        raise ValueError(f"{entry['id']}: steps.renormalise_rows needs steps.mask zero_above_diagonal")


def assert_reproduced(result: Any, entry: dict[str, Any], route: str = "result") -> None:
    """Compare a result with an entry by the rule in ``README.md``.

    Raises:
        AssertionError: it differs; the message has the count, the worst index, both values and what was allowed.
    """
    expected = np.array(_numbers(entry["value"]), np.float64)
    result = np.asarray(result, np.float64)
    label = f"{entry['id']} ({route})"
    assert result.shape == expected.shape, f"{label}: shape {result.shape}, expected {expected.shape}"
    allowed = 0.0 if entry["printed"] == "shape" else 0.5 * 10.0 ** -entry["decimals"] + ROUNDING
    with np.errstate(invalid="ignore"):
        error = np.where(result == expected, 0.0, np.abs(result - expected))
    error = np.where(np.isnan(error), np.inf, error)
    if np.all(error <= allowed):
        return
    worst = np.unravel_index(int(error.argmax()), error.shape)
    raise AssertionError(
        f"{label}: {np.count_nonzero(error > allowed)} of {error.size} elements differ; worst at "
        f"{tuple(map(int, worst))}: {result[worst]}, expected {expected[worst]} within {allowed}"
    )


def _flatten(recipe: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return dotted field -> value; a step that is null as a whole says nothing."""
    fields = []
    for name, value in recipe.items():
        if isinstance(value, dict):
            fields += [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif value is not None:
            fields.append((name, value))
    return fields


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return -np.inf if value == "-inf" else value
