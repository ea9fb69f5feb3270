"""Test vectors of random numbers: what JAX, Flax and torch drew when ``make_random_vectors`` was run.

``random_jax.json`` and ``random_torch.json`` hold the versions and, case by case, what to draw and the bytes drawn;
both, where they are others with arithmetic in float16 (`rng.fused.COMPUTES_FLOAT16`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import rng

SEEDS = (0, 1, 123, 2**31 - 1, -1, 2**32 + 5)


def jax_cases() -> list[dict[str, Any]]:
    """Return what to draw with JAX: a function of `jax.random`, its arguments, and whether 64-bit types are on."""
    cases: list[dict[str, Any]] = []
    for seed in SEEDS:
        for x64 in (False, True):
            common = {"seed": seed, "x64": x64}
            cases.append({"function": "key", **common})
            cases += [{"function": "fold_in", **common, "data": data} for data in (0, 7, 2**32 - 1)]
            cases.append({"function": "split", **common, "num": 3})
            unsigned = ("uint8", "uint16", "uint32", *(["uint64"] if x64 else []))
            cases += [{"function": "bits", **common, "shape": [2, 3], "dtype": dtype} for dtype in unsigned]
            floats = ("float16", "bfloat16", "float32", *(["float64"] if x64 else []))
            cases += [
                {"function": "uniform", **common, "shape": [5], "dtype": dtype, "minval": low, "maxval": high}
                for dtype in floats
                for low, high in ((0.0, 1.0), (-0.3, 0.9))
            ]
            cases += [{"function": "bernoulli", **common, "p": p, "shape": [4, 5]} for p in (0.1, 0.5, 0.9)]
        cases.append({"function": "streams", "seed": seed, "x64": False})
    return cases


def torch_cases() -> list[dict[str, Any]]:
    """Return what to draw with torch after ``torch.manual_seed(seed)``."""
    cases: list[dict[str, Any]] = []
    for seed in SEEDS:
        cases += [{"function": "rand", "seed": seed, "shape": [7], "dtype": dtype} for dtype in DTYPES]
        cases += [
            {"function": "uniform", "seed": seed, "shape": [7], "low": -0.3, "high": 0.9, "dtype": d} for d in DTYPES
        ]
        cases += [{"function": "linear", "seed": seed, "d_in": 3, "d_out": d_out} for d_out in (1, 4)]
        cases += [{"function": "bernoulli", "seed": seed, "shape": [4, 5], "p": p} for p in (0.1, 0.5, 0.9)]
        cases += [{"function": "randn", "seed": seed, "shape": [size]} for size in (5, 16, 37)]
    return cases


DTYPES = ("float16", "bfloat16", "float32", "float64")


def load(name: str) -> dict[str, Any]:
    """Return ``random_jax.json`` or ``random_torch.json``."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name(f"random_{name}.json").read_text(encoding="utf-8"))
    return document


def streams(rngs: Callable[..., Any], key_data: Callable[[Any], Any]) -> list[Any]:
    """Return keys from a walk through streams: default and named ones, a fork, and counts that go on."""
    one = rngs(default=5, dropout=7)
    found = [one.params(), one(), one.dropout(), one["dropout"]()]
    forked = one.fork()
    found += [forked.params(), forked.dropout(), one.noise(), one.dropout.fork()(), one.dropout()]
    return [key_data(key) for key in found]


def check(name: str, draw: Callable[[Mapping[str, Any]], np.ndarray | None]) -> int:
    """Compare what `draw` gives for every case with the stored bytes; it returns None for a case it can't draw.

    Raises:
        AssertionError: a case differs; names it, and the versions that drew the vector.
    """
    document = load(name)
    count = 0
    for case in document["cases"]:
        result = draw(case["draw"])
        if result is None:
            continue
        count += 1
        expected = case.get("bytes with float16", case["bytes"]) if rng.fused.COMPUTES_FLOAT16 else case["bytes"]
        assert result.tobytes().hex() == expected, (
            f"the random stream of {case['draw']} is not what {document['versions']} drew: "
            f"{result.tobytes().hex()}, expected {expected}"
        )
    return count
