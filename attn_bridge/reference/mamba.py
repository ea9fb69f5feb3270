"""Mamba token by token (Gu and Dao, arXiv 2312.00752, algorithm 2), with the convolution and gate of its block."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from ..specs import MambaConfig
from .attention import as_double, linear, over_sequences, short_convolution, silu


def reference(
    config: MambaConfig, parameters: Mapping[str, np.ndarray], x: np.ndarray, attention_mask: np.ndarray | None = None
) -> tuple[np.ndarray, None]:
    """Return the context read from the states of all channels; there are no weights.

    Tokens that `attention_mask` hides are zeros, in the input and on both sides of the convolution. Shapes: `x`
    ``([b,] t, d_in)``, `attention_mask` ``(b, t)``; gives ``([b,] t, d_out)``.
    """
    return over_sequences(functools.partial(_sequence, config, parameters), x, attention_mask), None


def _sequence(config: MambaConfig, parameters: Mapping[str, np.ndarray], x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    mask = mask[:, None]
    x = np.where(mask, x, 0.0)
    value = np.where(mask, linear(x, parameters, "W_value", bias=config.bias), 0.0)
    value = short_convolution(value, as_double(parameters["conv1d.weight"])[:, 0, :])
    if config.conv_bias:
        value = value + as_double(parameters["conv1d.bias"])
    value = np.where(mask, silu(value), 0.0)
    step, key, query = (
        _latent(config, value, parameters, *names)
        for names in (("W_step_down", "step_norm"), ("W_key", "k_norm"), ("W_query", "q_norm"))
    )
    total = linear(step, parameters, "W_step_up", bias=False) + as_double(parameters["dt_bias"])
    step = np.log(1.0 + np.exp(total))
    rates = -np.exp(as_double(parameters["A_log"]))
    state = np.zeros(rates.shape, np.result_type(step, key, value, rates))
    context = np.zeros(value.shape, np.result_type(state, query))
    for token in range(len(x)):
        state = np.exp(rates * step[token][:, None]) * state + np.outer(step[token] * value[token], key[token])
        context[token] = state @ query[token]
    context = context + as_double(parameters["D"]) * value
    gated = context * silu(linear(x, parameters, "W_gate", bias=config.bias))
    return linear(gated, parameters, "out_proj", bias=config.bias)


def _latent(
    config: MambaConfig, value: np.ndarray, parameters: Mapping[str, np.ndarray], name: str, norm: str
) -> np.ndarray:
    """Return a projection of the values ``(t, channels)``, normalised where the config has norms."""
    latent = linear(value, parameters, name, bias=False)
    if config.latent_norms == "none":
        return latent
    normed = latent / np.sqrt(np.mean(latent * latent, -1, keepdims=True) + config.eps)
    return as_double(parameters[f"{norm}.scale"]) * normed if config.latent_norms == "scaled" else normed
