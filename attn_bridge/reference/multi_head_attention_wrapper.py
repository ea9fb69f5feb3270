"""Several causal heads side by side in evaluation mode, concatenated (book section 3.6.1)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import MultiHeadAttentionWrapperConfig
from .attention import attend, linear, merge_heads


def reference(
    config: MultiHeadAttentionWrapperConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated contexts of the heads and their weights; `d_out` is the width of one head.

    Shapes: `x` ``([b,] t, d_in)``; gives ``([b,] t, h * d_out)`` and ``([b,] h, t, t)``.
    """
    query, key, value = (
        np.stack(
            [linear(x, parameters, f"heads.{head}.{name}", bias=config.qkv_bias) for head in range(config.num_heads)],
            axis=-3,
        )
        for name in ("W_query", "W_key", "W_value")
    )
    context, weights = attend(query, key, value, scale=config.d_out**-0.5, causal=True, attention_mask=attention_mask)
    return merge_heads(context), weights
