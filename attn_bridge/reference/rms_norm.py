"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import RMSNormConfig
from .attention import as_double


def reference(
    config: RMSNormConfig, parameters: Mapping[str, np.ndarray], x: np.ndarray, attention_mask: np.ndarray | None = None
) -> tuple[np.ndarray, None]:
    """Return ``scale * x / sqrt(mean square + eps)``, each token on its own; there are no weights.

    Shapes: `x` ``(..., d)``; gives ``(..., d)``.

    Raises:
        ValueError: a mask was given, which has no meaning here.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask must be None, a norm attends to nothing")
    scale = parameters["scale"] if config.affine else np.ones(config.emb_dim)
    return rms_norm(as_double(x), scale, eps=config.eps, unit_offset=config.unit_offset), None


def rms_norm(x: np.ndarray, scale: np.ndarray, *, eps: float, unit_offset: bool = False) -> np.ndarray:
    """Divide by the root of the mean square of the last axis, and multiply by `scale`, or by 1 more than it."""
    mean_square = np.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
    return (as_double(scale) + (1.0 if unit_offset else 0.0)) * x / np.sqrt(mean_square + eps)
