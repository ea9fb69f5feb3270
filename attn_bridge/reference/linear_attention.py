"""Linear attention in evaluation mode, weight by weight (Katharopoulos et al., arXiv 2006.16236, equation 9)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import LinearAttentionConfig
from .attention import linear, merge_heads, split_heads, visible_keys


def reference(
    config: LinearAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the projected contexts of the heads and their weights; zeros where no key is visible.

    Shapes: `x` ``([b,] t, d_in)``; gives ``([b,] t, d_out)`` and ``([b,] h, t, t)``.
    """
    if np.ndim(x) == 2:
        output, weights = reference(config, parameters, np.asarray(x)[None], attention_mask)
        return output[0], weights[0]
    query, key, value = (
        split_heads(linear(x, parameters, name, bias=config.qkv_bias), config.num_heads)
        for name in ("W_query", "W_key", "W_value")
    )
    query, key = _features(query), _features(key)
    shape = (*query.shape[:3], key.shape[2])
    visible = visible_keys(shape, causal=True, attention_mask=attention_mask)
    weights = np.zeros(shape, np.result_type(query, key))
    for b, h, t in np.ndindex(shape[:3]):
        keys = np.flatnonzero(visible[b, h, t])
        products = np.array([np.sum(query[b, h, t] * key[b, h, s]) for s in keys])
        weights[b, h, t, keys] = products / np.sum(products)
    context = np.zeros((*shape[:3], value.shape[-1]), np.result_type(weights, value))
    for b, h, t, s in np.ndindex(shape):
        context[b, h, t] += weights[b, h, t, s] * value[b, h, s]
    return linear(merge_heads(context), parameters, "out_proj", bias=config.out_bias), weights


def _features(x: np.ndarray) -> np.ndarray:
    """Return ``elu(x) + 1``: ``x + 1`` where x is positive, ``exp(x)`` elsewhere."""
    return np.where(x.real > 0, x + 1.0, np.exp(np.where(x.real > 0, 0.0, x)))
