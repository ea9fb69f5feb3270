"""Causal multi-head attention in evaluation mode (book section 3.6.2; Vaswani et al., arXiv 1706.03762, 3.2.2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import MultiHeadAttentionConfig
from .attention import attend, linear, merge_heads, split_heads


def reference(
    config: MultiHeadAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the projected contexts of the heads and their weights; `d_out` is the total over the heads.

    Shapes: `x` ``([b,] t, d_in)``; gives ``([b,] t, d_out)`` and ``([b,] h, t, t)``.
    """
    query, key, value = (
        split_heads(linear(x, parameters, name, bias=config.qkv_bias), config.num_heads)
        for name in ("W_query", "W_key", "W_value")
    )
    scale = (config.d_out // config.num_heads) ** -0.5
    context, weights = attend(query, key, value, scale=scale, causal=True, attention_mask=attention_mask)
    return linear(merge_heads(context), parameters, "out_proj", bias=True), weights
