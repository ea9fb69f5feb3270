"""Rotary positions in rows (time, height, width) in every attention that turns its queries and keys."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attn_bridge import reference
from attn_bridge.masks import full
from attn_bridge.specs import (
    Config,
    DifferentialAttentionConfig,
    GroupedQueryAttentionConfig,
    Indexer,
    MultiHeadLatentAttentionConfig,
    Rotary,
    SparseIndexedAttentionConfig,
    find_variant,
)

from .. import backends

backend = backends.fixture(backends.adapters("backend"))

SECTIONS, TURNS = Rotary(50.0, axes=(1, 2, 1)), Rotary(50.0, axes=(2, 1, 1), layout="interleaved")
CONFIGS: dict[str, tuple[str, Any]] = {
    "grouped": ("GroupedQueryAttention", GroupedQueryAttentionConfig(8, 2, 1, 8, position=SECTIONS)),
    "latent": ("MultiHeadLatentAttention", MultiHeadLatentAttentionConfig(8, 2, 4, 3, 8, 4, position=TURNS)),
    "indexed": (
        "SparseIndexedAttention",
        SparseIndexedAttentionConfig(
            8, 2, 4, 3, 8, 4, query_dim=3, position=SECTIONS, indexer=Indexer(2, 10, top_k=3, pairing="half")
        ),
    ),
    "differential": ("DifferentialAttention", DifferentialAttentionConfig(16, 2, position=TURNS)),
}
X = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
POSITIONS = np.random.default_rng(1).integers(0, 20, (3, 2, 5)).astype(np.int32)


def drawn(backend: ModuleType, variant: str, config: Config) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a module and its weights, none of them 0."""
    random, module = np.random.default_rng(3), backend.build(variant, config=config)
    weights = {row.rule.torch: random.normal(size=row.shape).astype(np.float32) * 0.6 for row in config.parameters}
    backend.load(module, weights)
    return module, weights


def call(backend: ModuleType, module: Any, x: np.ndarray, **options: Any) -> np.ndarray:
    found = module(backend.as_argument(x), **{name: backend.as_argument(one) for name, one in options.items()})
    return np.asarray(found.detach() if hasattr(found, "detach") else found)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_pair_turns_by_its_row(backend, name):
    variant, config = CONFIGS[name]
    (module, weights), x = drawn(backend, variant, config), X[..., : config.d_in]
    arrays = {key: one.astype(np.float64) for key, one in weights.items()}
    expected, _ = reference.find(find_variant(variant))(config, arrays, x, positions=POSITIONS)
    found = call(backend, module, x, positions=POSITIONS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    others = call(backend, module, x, positions=POSITIONS[::-1].copy())
    assert np.abs(found - others).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_rows_are_plain_positions_to_the_last_bit(backend, name):
    variant, config = CONFIGS[name]
    x = X[..., : config.d_in]
    module, weights = drawn(backend, variant, config)
    plain = backend.build(
        variant, config=config.replace(position=dataclasses.replace(config.position, axes=None, layout="sections"))
    )
    backend.load(plain, weights)
    for given in (POSITIONS[0], POSITIONS[0, 0]):
        expected = call(backend, plain, x, positions=given)
        rows = np.broadcast_to(given, (3, 2, 5)).copy()
        np.testing.assert_array_equal(call(backend, module, x, positions=given), expected)
        np.testing.assert_array_equal(call(backend, module, x, positions=rows), expected)
    np.testing.assert_array_equal(call(backend, module, x), call(backend, plain, x))


AXIAL = GroupedQueryAttentionConfig(8, 2, 1, 8, position=Rotary(axes=(2, 2), layout="axial"), mask=full())
WRONG: dict[str, tuple[Any, Any, str]] = {
    "too few rows": (CONFIGS["grouped"][1], POSITIONS[:2], "(rows, B, T) = (3, 2, 5), got (2, 2, 5)"),
    "no batch": (CONFIGS["grouped"][1], POSITIONS[:, :, None], "(rows, B, T) = (3, 2, 5), got (3, 2, 1, 5)"),
    "a plain rotary": (
        CONFIGS["grouped"][1].replace(position=Rotary()),
        POSITIONS,
        "(T,) or (B, T) = (2, 5), got (3, 2, 5)",
    ),
    "an image": (AXIAL, POSITIONS[0], "(rows, B, T) = (2, 2, 5), got (2, 5)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_rows_are_refused(backend, case):
    config, positions, message = WRONG[case]
    module = backend.build("GroupedQueryAttention", config=config)
    with pytest.raises(ValueError, match="positions") as caught:
        call(backend, module, X[..., :8], positions=positions)
    assert str(caught.value) == f"positions must have shape {message}"


def test_an_image_without_positions_is_refused(backend):
    module = backend.build("GroupedQueryAttention", config=AXIAL)
    with pytest.raises(ValueError, match=r"^positions of an image must be given, .* \(rows, B, T\) = \(2, 2, 5\)$"):
        call(backend, module, X[..., :8])
