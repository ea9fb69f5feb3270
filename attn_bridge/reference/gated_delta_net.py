"""Gated DeltaNet token by token (Yang et al., arXiv 2412.06464), with the convolution and the norm of Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import GatedDeltaNetConfig
from .attention import as_double, linear, merge_heads, short_convolution, sigmoid, silu, split_heads, unit


def reference(
    config: GatedDeltaNetConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, None]:
    """Return the tokens' reads from a state that decays and is corrected, and None for weights.

    Tokens that `attention_mask` hides are zeros. Shapes: `x` ``([b,] t, d_in)``, `attention_mask` ``(b, t)``; gives
    ``([b,] t, d_out)``.
    """
    x = as_double(x)
    if attention_mask is not None:
        x = np.where(np.asarray(attention_mask)[..., None], x, 0.0)
    if x.ndim == 3:
        return np.stack([reference(config, parameters, row)[0] for row in x]), None
    kernel = as_double(parameters["conv1d.weight"])[:, 0, :]
    joined = np.concatenate([_project(x, parameters, name) for name in ("W_query", "W_key", "W_value")], -1)
    joined = silu(short_convolution(joined, kernel))
    width = config.num_heads * config.head_dim
    query, key = (split_heads(joined[:, start : start + width], config.num_heads) for start in (0, width))
    value = split_heads(joined[:, 2 * width :], config.num_value_heads)
    gate = split_heads(_project(x, parameters, "W_gate"), config.num_value_heads)
    beta = (2.0 if config.negative else 1.0) * sigmoid(_project(x, parameters, "W_beta"))
    step = np.log(1.0 + np.exp(_project(x, parameters, "W_alpha") + as_double(parameters["dt_bias"])))
    decay = np.exp(-np.exp(as_double(parameters["A_log"])) * step)
    contexts = []
    for head in range(config.num_value_heads):
        shared = head * config.num_heads // config.num_value_heads
        arrays = (unit(query[shared]) * config.head_dim**-0.5, unit(key[shared]), value[head])
        context = _recur(*arrays, decay[:, head], beta[:, head])
        root = np.sqrt(np.sum(context * context, -1, keepdims=True) / config.value_head_dim + config.eps)
        contexts.append(as_double(parameters["norm.scale"]) * context / root * silu(gate[head]))
    return _project(merge_heads(np.stack(contexts)), parameters, "out_proj"), None


def _project(x: np.ndarray, parameters: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return linear(x, parameters, name, bias=False)


def _recur(query: np.ndarray, key: np.ndarray, value: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Return the read of each query of one head.

    Shapes: `query` and `key` ``(t, c)``, `value` ``(t, v)``, `decay` and `beta` ``(t,)``; gives ``(t, v)``.
    """
    state = np.zeros((value.shape[1], key.shape[1]), np.result_type(query, key, value, decay, beta))
    context = np.zeros(value.shape, state.dtype)
    for token in range(len(value)):
        k = key[token]
        # S = alpha S (I - beta k k^T) + beta v k^T, multiplied out. The backends decay first and correct the decayed
        # state: beta (v - alpha S k) k^T, the same in exact arithmetic.
        state = decay[token] * (state - beta[token] * np.outer(state @ k, k)) + beta[token] * np.outer(value[token], k)
        context[token] = state @ query[token]
    return context
