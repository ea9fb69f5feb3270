"""The choice of keys by an indexer, by its formulas (DeepSeek-V3.2, arXiv 2512.02556, equations 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import Indexer, Rotary
from .attention import as_double, linear, split_heads
from .layer_norm import reference as layer_norm
from .rotary import rotate


def chosen_keys(
    config: Indexer,
    parameters: Mapping[str, np.ndarray],
    asking: np.ndarray,
    x: np.ndarray,
    visible: np.ndarray,
    position: Rotary | None,
    positions: np.ndarray,
) -> np.ndarray:
    """Return which of the visible keys each query attends to: bool ``(b, h, t, s)``, where b and h may be 1.

    Scores are real numbers: a choice has no derivative. Of equal ones the earliest key comes first.

    Shapes: `asking` ``([b,] t, q)``, `x` ``([b,] t, d_in)``, `visible` broadcastable to ``(b, h, t, s)``.
    """
    parameters = {name: np.real(array) for name, array in parameters.items()}
    asking, x = np.real(asking), np.real(x)
    query = split_heads(linear(asking, parameters, "W_index_query", bias=False), config.num_heads)
    norm = {leaf: parameters[f"key_norm.{leaf}"] for leaf in ("scale", "shift")}
    key = layer_norm(config.key_norm, norm, linear(x, parameters, "W_index_key", bias=False))[0][..., None, :, :]
    if position is not None:
        query, key = (rotate(part, position, positions) for part in (query, key))
    weight = linear(x, parameters, "W_index_weights", bias=False) * config.num_heads**-0.5
    scores = np.zeros((*x.shape[:-1], x.shape[-2]))
    for head in range(config.num_heads):
        products = as_double(query)[..., head, :, :] @ np.swapaxes(key[..., 0, :, :], -1, -2)
        scores += weight[..., head, None] * np.maximum(products * config.head_dim**-0.5, 0.0)
    scores = scores if scores.ndim == 3 else scores[None]
    visible = np.array(np.broadcast_to(visible, np.broadcast_shapes(visible.shape, scores[:, None].shape)))
    for b, h, t in np.ndindex(visible.shape[:3]):
        keys = np.flatnonzero(visible[b, h, t])
        ranked = sorted(keys, key=lambda s: (-scores[b, t, s], s))  # is called at once
        visible[b, h, t, ranked[config.top_k :]] = False
    return visible
