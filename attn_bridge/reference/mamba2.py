"""Mamba-2 token by token (Dao and Gu, arXiv 2405.21060), with the convolution and the norm of its published layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from ..specs import Mamba2Config
from .attention import as_double, linear, over_sequences, short_convolution, silu


def reference(
    config: Mamba2Config, parameters: Mapping[str, np.ndarray], x: np.ndarray, attention_mask: np.ndarray | None = None
) -> tuple[np.ndarray, None]:
    """Return the context read from a state that fades; there are no weights.

    Tokens that `attention_mask` hides are zeros, in the input and on both sides of the convolution. Shapes: `x`
    ``([b,] t, d_in)``, `attention_mask` ``(b, t)``; gives ``([b,] t, d_out)``.
    """
    return over_sequences(functools.partial(_sequence, config, parameters), x, attention_mask), None


def _sequence(
    config: Mamba2Config, parameters: Mapping[str, np.ndarray], x: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    mask = np.ones(len(x), bool) if mask is None else mask
    x = np.where(mask[:, None], x, 0.0)
    joined = np.concatenate([_project(config, x, parameters, name) for name in ("W_value", "W_key", "W_query")], -1)
    joined = short_convolution(np.where(mask[:, None], joined, 0.0), as_double(parameters["conv1d.weight"])[:, 0, :])
    if config.conv_bias:
        joined = joined + as_double(parameters["conv1d.bias"])
    joined = np.where(mask[:, None], silu(joined), 0.0)
    value = joined[:, : config.width]
    key = joined[:, config.width : config.width + config.key_width]
    query = joined[:, config.width + config.key_width :]
    step = np.log(1.0 + np.exp(_project(config, x, parameters, "W_step") + as_double(parameters["dt_bias"])))
    # By the real part: references run on complex numbers too, which have no order.
    step = np.where(step.real < config.min_step, config.min_step, step)
    if config.max_step is not None:
        step = np.where(step.real > config.max_step, config.max_step, step)
    decay = np.exp(-np.exp(as_double(parameters["A_log"])) * step)
    contexts = []
    for head in range(config.num_heads):
        group = head * config.num_groups // config.num_heads
        own = slice(head * config.head_dim, (head + 1) * config.head_dim)
        shared = slice(group * config.state_size, (group + 1) * config.state_size)
        context = _recur(query[:, shared], key[:, shared], value[:, own], step[:, head], decay[:, head])
        contexts.append(context + as_double(parameters["D"])[head] * value[:, own])
    output, gate = np.concatenate(contexts, -1), silu(_project(config, x, parameters, "W_gate"))
    if config.norm_order != "norm_first":
        output = output * gate
    if config.norm_order != "none":
        parts = output.reshape(len(x), config.norm_groups, -1)
        normed = parts / np.sqrt(np.mean(parts * parts, -1, keepdims=True) + config.eps)
        output = as_double(parameters["norm.scale"]) * normed.reshape(len(x), -1)
    if config.norm_order == "norm_first":
        output = output * gate
    return linear(output, parameters, "out_proj", bias=config.bias)


def _project(config: Mamba2Config, x: np.ndarray, parameters: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    factors = dict(zip(("W_gate", "W_value", "W_key", "W_query", "W_step"), config.projection_scales, strict=True))
    return factors[name] * linear(x, parameters, name, bias=config.bias)


def _recur(query: np.ndarray, key: np.ndarray, value: np.ndarray, step: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Return the read of each query of a head (equation 1 of the paper, discretised as in its section 2.2).

    Shapes: `query` and `key` ``(t, n)``, `value` ``(t, p)``, `step` and `decay` ``(t,)``; gives ``(t, p)``.
    """
    state = np.zeros((value.shape[1], key.shape[1]), np.result_type(query, key, value, step, decay))
    context = np.zeros(value.shape, state.dtype)
    for token in range(len(value)):
        state = decay[token] * state + step[token] * np.outer(value[token], key[token])
        context[token] = state @ query[token]
    return context
