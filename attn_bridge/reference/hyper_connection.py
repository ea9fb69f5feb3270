"""Manifold-constrained hyper-connections (arXiv 2512.24880, equations 7 to 9), token by token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import HyperConnectionConfig
from .attention import as_double, sigmoid
from .rms_norm import rms_norm


def read(
    config: HyperConnectionConfig, parameters: Mapping[str, np.ndarray], streams: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the input of the layer, the shares of its output, and the matrix that mixes the streams.

    Shapes: `streams` ``(..., n, d)``; gives ``(..., d)``, ``(..., n)`` and ``(..., n, n)``; without `config.writes` the
    last two have no entries.
    """
    streams = as_double(streams)
    tokens = streams.reshape(-1, config.streams, config.emb_dim)
    read_, written, mixed = zip(*(_token(config, parameters, token) for token in tokens), strict=True)
    batch = streams.shape[:-2]
    x = np.stack([share @ token for share, token in zip(read_, tokens, strict=True)])
    parts = (x, np.stack(written), np.stack(mixed))
    x, shares, mixing = (part.reshape(*batch, *part.shape[1:]) for part in parts)
    return x, shares, mixing


def write(streams: np.ndarray, output: np.ndarray, shares: np.ndarray, mixing: np.ndarray) -> np.ndarray:
    """Return the mixed streams plus their shares of a layer's output, ``(..., n, d)``."""
    return np.swapaxes(mixing, -1, -2) @ as_double(streams) + shares[..., None] * output[..., None, :]


def _token(
    config: HyperConnectionConfig, parameters: Mapping[str, np.ndarray], streams: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the shares that the layer reads of each stream of a token, those that it writes, and the mixing matrix.

    Shapes: `streams` ``(n, d)``; gives ``(n,)``, ``(n,)`` and ``(n, n)``; without `config.writes` the last two are
    empty.
    """
    n = config.streams
    weight, bias, scale = (as_double(parameters[name]) for name in ("projection.weight", "bias", "scale"))
    raw = weight @ rms_norm(streams.reshape(-1), np.ones(streams.size), eps=config.norm_eps)
    shares = sigmoid(scale[0] * raw[:n] + bias[:n]) + config.eps
    if not config.writes:
        return shares, np.zeros(0), np.zeros((0, 0))
    written = 2.0 * sigmoid(scale[1] * raw[n : 2 * n] + bias[n : 2 * n])
    logits = (scale[2] * raw[2 * n :] + bias[2 * n :]).reshape(n, n)
    matrix = np.exp(logits)
    matrix = matrix / matrix.sum(1, keepdims=True) + config.eps
    for number in range(config.iterations):
        if number:
            matrix = matrix / (matrix.sum(1, keepdims=True) + config.eps)
        matrix = matrix / (matrix.sum(0, keepdims=True) + config.eps)
    return shares, written, matrix
