"""Causal self-attention in evaluation mode, without dropout (book section 3.5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import CausalAttentionConfig
from .attention import attend, linear, split_heads


def reference(
    config: CausalAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the context and the weights where query ``i`` sees keys ``0..i``.

    Shapes: `x` ``([b,] t, d_in)``; gives ``([b,] t, d_out)`` and ``([b,] t, t)``.
    """
    query, key, value = (
        split_heads(linear(x, parameters, name, bias=config.qkv_bias), 1) for name in ("W_query", "W_key", "W_value")
    )
    context, weights = attend(query, key, value, scale=config.d_out**-0.5, causal=True, attention_mask=attention_mask)
    return context[..., 0, :, :], weights[..., 0, :, :]
