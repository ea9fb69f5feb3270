"""Attention to another sequence (Vaswani et al., arXiv 1706.03762, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import CrossAttentionConfig
from .attention import as_double, attend, linear, merge_heads, split_heads


def reference(
    config: CrossAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
    *,
    context: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output ``([b,] t, d_out)`` and the attention weights ``([b,] h, t, s)``.

    Shapes: `x` ``([b,] t, d_in)``, `context` ``([b,] s, d_context)``.
    """
    query = split_heads(linear(x, parameters, "W_query", bias=config.qkv_bias), config.num_heads)
    key = split_heads(linear(context, parameters, "W_key", bias=config.key_bias), config.num_kv_heads)
    value = split_heads(linear(context, parameters, "W_value", bias=config.qkv_bias), config.num_kv_heads)
    of_query_head = [head // (config.num_heads // config.num_kv_heads) for head in range(config.num_heads)]
    context, weights = attend(
        query,
        key[..., of_query_head, :, :],
        value[..., of_query_head, :, :],
        scale=config.scale,
        causal=False,
        attention_mask=attention_mask,
    )
    return linear(merge_heads(context), parameters, "out_proj", bias=config.out_bias), as_double(weights)
