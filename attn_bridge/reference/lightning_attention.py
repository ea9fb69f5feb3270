"""Lightning attention token by token (Qin et al., arXiv 2405.17381), with the norm and the gate of MiniMax-01."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import LightningAttentionConfig
from .attention import as_double, linear, merge_heads, sigmoid, silu, split_heads


def reference(
    config: LightningAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, None]:
    """Return the context read from states that fade at a fixed rate; there are no weights.

    Tokens that `attention_mask` hides are zeros. Shapes: `x` ``([b,] t, d_in)``, `attention_mask` ``(b, t)``; gives
    ``([b,] t, d_out)``.
    """
    x = as_double(x)
    if attention_mask is not None:
        x = np.where(np.asarray(attention_mask)[..., None], x, 0.0)
    if x.ndim == 3:
        return np.stack([reference(config, parameters, row)[0] for row in x]), None
    query, key, value = (
        split_heads(silu(linear(x, parameters, name, bias=False)), config.num_heads)
        for name in ("W_query", "W_key", "W_value")
    )
    heads = [_recur(*arrays) for arrays in zip(query, key, value, config.decay_rates, strict=True)]
    context = merge_heads(np.stack(heads))
    root = np.sqrt(np.mean(context * context, -1, keepdims=True) + config.eps)
    gate = sigmoid(linear(x, parameters, "W_gate", bias=False))
    gated = as_double(parameters["norm.scale"]) * context / root * gate
    return linear(gated, parameters, "out_proj", bias=False), None


def _recur(query: np.ndarray, key: np.ndarray, value: np.ndarray, rate: float) -> np.ndarray:
    """Return the read of each query ``(t, c)`` of a head, ``(t, c)``."""
    state = np.zeros((key.shape[1], value.shape[1]), np.result_type(query, key, value))
    context = np.zeros(value.shape, state.dtype)
    for token in range(len(value)):
        state = np.exp(-rate) * state + np.outer(key[token], value[token])
        context[token] = query[token] @ state
    return context
