"""Latent attention to the keys that an indexer chooses, by its formulas (arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..specs import SparseIndexedAttentionConfig
from . import multi_head_latent_attention
from .lightning_indexer import chosen_keys


def reference(
    config: SparseIndexedAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
    *,
    positions: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output ``([b,] t, d_out)`` and the attention weights ``([b,] h, t, s)``.

    Shapes: `x` ``([b,] t, d_in)``; `positions` ``(t,)``, ``(b, t)`` or, of a `Rotary` with axes, ``(rows, b, t)``, from
    0 without padding on the left by default.
    """
    own = {name.removeprefix("indexer."): array for name, array in parameters.items() if name.startswith("indexer.")}
    rotary = config.position
    if rotary is not None:  # the same angles, of the first channels of a head
        rotary = dataclasses.replace(rotary, dim=config.rope_dim, pairing=config.indexer.pairing)

    def choose(asking: np.ndarray, visible: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return chosen_keys(config.indexer, own, asking, x, visible, rotary, numbers)

    return multi_head_latent_attention.reference(
        config, parameters, x, attention_mask, positions=positions, choose=choose
    )
