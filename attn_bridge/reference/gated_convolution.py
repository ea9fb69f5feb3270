"""Gated short convolution (LFM2, arXiv 2511.23404, section 2.1), token by token."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from ..specs import GatedConvolutionConfig
from .attention import as_double, linear, over_sequences, short_convolution


def reference(
    config: GatedConvolutionConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, None]:
    """Return queries times the convolved products of keys and values, projected; there are no weights.

    The convolution reads zeros of tokens that `attention_mask` hides. Shapes: `x` ``([b,] t, d_in)``, `attention_mask`
    ``(b, t)``; gives ``([b,] t, d_out)``.
    """
    return over_sequences(functools.partial(_sequence, config, parameters), x, attention_mask), None


def _sequence(
    config: GatedConvolutionConfig, parameters: Mapping[str, np.ndarray], x: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    mask = mask[:, None]
    x = np.where(mask, x, 0.0)
    query, key, value = (linear(x, parameters, name, bias=config.bias) for name in ("W_query", "W_key", "W_value"))
    mixed = short_convolution(np.where(mask, key * value, 0.0), as_double(parameters["conv1d.weight"])[:, 0, :])
    if config.bias:
        mixed = mixed + as_double(parameters["conv1d.bias"])
    return linear(query * mixed, parameters, "out_proj", bias=config.bias)
