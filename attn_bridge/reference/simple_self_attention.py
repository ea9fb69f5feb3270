"""Simple self-attention without trainable weights (book section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import SimpleSelfAttentionConfig
from .attention import as_double, attend, split_heads


def reference(
    config: SimpleSelfAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``softmax(x x^T) x`` and the weights.

    Shapes: `x` ``([b,] t, d)``; gives ``([b,] t, d)`` and ``([b,] t, t)``.
    """
    tokens = split_heads(as_double(x), 1)
    context, weights = attend(tokens, tokens, tokens, scale=1.0, causal=False, attention_mask=attention_mask)
    return context[..., 0, :, :], weights[..., 0, :, :]
