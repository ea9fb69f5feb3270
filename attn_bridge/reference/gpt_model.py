"""GPT-2 in evaluation mode (book section 4.6): pre-norm blocks, GELU by tanh (arXiv 1606.08415)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..specs import GPTModelConfig
from . import layer_norm, multi_head_attention
from .attention import as_double, linear


def reference(config: GPTModelConfig, parameters: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Return the logits of the token that follows each position.

    Shapes: `ids` ``(b, t)``; gives ``(b, t, vocab_size)``.
    """
    x = as_double(parameters["tok_emb.weight"])[ids] + as_double(parameters["pos_emb.weight"])[: ids.shape[1]]
    for index in range(config.n_layers):
        block = under(f"trf_blocks.{index}", parameters)
        normed, _ = layer_norm.reference(config.norm, under("norm1", block), x)
        x = x + multi_head_attention.reference(config.attention, under("att", block), normed)[0]
        normed, _ = layer_norm.reference(config.norm, under("norm2", block), x)
        hidden = linear(normed, block, "ff.layers.0", bias=True)
        # The approximation of GELU by tanh (arXiv 1606.08415, section 2), as GPT-2 has it.
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + linear(hidden, block, "ff.layers.2", bias=True)
    x, _ = layer_norm.reference(config.norm, under("final_norm", parameters), x)
    return linear(x, parameters, "out_head", bias=False)


def under(prefix: str, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters below a path, under their names there."""
    return {name.removeprefix(f"{prefix}."): p for name, p in parameters.items() if name.startswith(f"{prefix}.")}
