"""Kimi Delta Attention token by token (arXiv 2510.26692, equation 1), with the layers of Kimi Linear around it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import KimiDeltaAttentionConfig
from .attention import as_double, linear, merge_heads, short_convolution, sigmoid, silu, split_heads, unit


def reference(
    config: KimiDeltaAttentionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, None]:
    """Return the context read from states that fade channel by channel and are corrected; there are no weights.

    Tokens that `attention_mask` hides are zeros. Shapes: `x` ``([b,] t, d_in)``, `attention_mask` ``(b, t)``; gives
    ``([b,] t, d_out)``.
    """
    x = as_double(x)
    if attention_mask is not None:
        x = np.where(np.asarray(attention_mask)[..., None], x, 0.0)
    if x.ndim == 3:
        return np.stack([reference(config, parameters, row)[0] for row in x]), None
    joined = np.concatenate([_project(x, parameters, name) for name in ("W_query", "W_key", "W_value")], -1)
    joined = silu(short_convolution(joined, as_double(parameters["conv1d.weight"])[:, 0, :]))
    width = config.key_width
    parts = (joined[:, :width], joined[:, width : 2 * width], joined[:, 2 * width :])
    query, key, value = (split_heads(part, config.num_heads) for part in parts)
    gate = sigmoid(_project(_project(x, parameters, "W_gate_down"), parameters, "W_gate_up"))
    beta = sigmoid(_project(x, parameters, "W_beta"))
    total = _project(_project(x, parameters, "W_decay_down"), parameters, "W_decay_up")
    step = split_heads(np.log(1.0 + np.exp(total + as_double(parameters["dt_bias"]))), config.num_heads)
    contexts = []
    for head in range(config.num_heads):
        decay = np.exp(-np.exp(as_double(parameters["A_log"])[head]) * step[head])
        scaled = unit(query[head]) * config.head_dim**-0.5
        context = _recur(scaled, unit(key[head]), value[head], decay, beta[:, head])
        root = np.sqrt(np.mean(context * context, -1, keepdims=True) + config.eps)
        contexts.append(as_double(parameters["norm.scale"]) * context / root)
    return _project(merge_heads(np.stack(contexts)) * gate, parameters, "out_proj"), None


def _project(x: np.ndarray, parameters: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return linear(x, parameters, name, bias=False)


def _recur(query: np.ndarray, key: np.ndarray, value: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Return the read of each query of one head.

    Shapes: `query`, `key` and `decay` ``(t, c)``, `value` ``(t, v)``, `beta` ``(t,)``; gives ``(t, v)``.
    """
    state = np.zeros((key.shape[1], value.shape[1]), np.result_type(query, key, value, decay, beta))
    context = np.zeros(value.shape, state.dtype)
    for token in range(len(value)):
        faded = decay[token][:, None] * state
        state = faded + beta[token] * np.outer(key[token], value[token] - key[token] @ faded)
        context[token] = query[token] @ state
    return context
