"""Layer normalisation with a biased, two-pass variance (book section 4.2; Ba et al., arXiv 1607.06450)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import LayerNormConfig
from .attention import as_double


def reference(
    config: LayerNormConfig,
    parameters: Mapping[str, np.ndarray],
    x: np.ndarray,
    attention_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, None]:
    """Return ``scale * (x - mean) / sqrt(variance + eps) + shift``, each token on its own; there are no weights.

    Shapes: `x` ``(..., d)``; gives ``(..., d)``.

    Raises:
        ValueError: a mask was given, which has no meaning here.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask must be None, a norm attends to nothing")
    x = as_double(x)
    width = x.shape[-1]
    centred = x - np.sum(x, axis=-1, keepdims=True) / width
    variance = np.sum(centred * centred, axis=-1, keepdims=True) / width
    normalised = centred / np.sqrt(variance + config.eps)
    if not config.affine:
        return normalised, None
    scaled = (as_double(parameters["scale"]) + (1.0 if config.unit_offset else 0.0)) * normalised
    return scaled + as_double(parameters["shift"]) if config.bias else scaled, None
