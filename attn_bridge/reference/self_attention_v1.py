"""Self-attention with bare weight matrices (book section 3.4.2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import SelfAttentionV1Config
from .attention import as_double, attend, split_heads


def reference(
    config: SelfAttentionV1Config,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``softmax(Q K^T / sqrt(d_out)) V`` and the weights, with ``Q = x W_query`` and likewise K and V.

    Shapes: `x` ``([b,] t, d_in)``; gives ``([b,] t, d_out)`` and ``([b,] t, t)``.
    """
    query, key, value = (
        split_heads(as_double(x) @ as_double(parameters[name]), 1) for name in ("W_query", "W_key", "W_value")
    )
    context, weights = attend(query, key, value, scale=config.d_out**-0.5, causal=False, attention_mask=attention_mask)
    return context[..., 0, :, :], weights[..., 0, :, :]
