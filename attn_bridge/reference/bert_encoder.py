"""BERT's encoder in evaluation mode (Devlin et al., arXiv 1810.04805): post-norm layers, exact GELU.

Real numbers only: the error function of the standard library takes no complex ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..specs import BertEncoderConfig
from . import layer_norm
from .attention import as_double, attend, linear, merge_heads, split_heads
from .gpt_model import under

_erf = np.vectorize(math.erf)


def reference(
    config: BertEncoderConfig,
    parameters: Mapping[str, np.ndarray],
    ids: np.ndarray,
    attention_mask: np.ndarray | None = None,
    token_type_ids: np.ndarray | None = None,
) -> np.ndarray:
    """Return the last hidden state.

    Shapes: `ids`, `attention_mask` (bool) and `token_type_ids` ``(b, t)``; gives ``(b, t, hidden_size)``.
    """
    types = np.zeros_like(ids) if token_type_ids is None else token_type_ids
    x = as_double(parameters["tok_emb.weight"])[ids] + as_double(parameters["type_emb.weight"])[types]
    x = x + as_double(parameters["pos_emb.weight"])[: ids.shape[1]]
    x, _ = layer_norm.reference(config.norm, under("emb_norm", parameters), x)
    heads = config.num_attention_heads
    for index in range(config.num_hidden_layers):
        layer = under(f"layers.{index}", parameters)
        query, key, value = (
            split_heads(linear(x, layer, f"att.{name}", bias=True), heads) for name in ("W_query", "W_key", "W_value")
        )
        scale = (config.hidden_size // heads) ** -0.5
        context, _ = attend(query, key, value, scale=scale, causal=False, attention_mask=attention_mask)
        x = x + linear(merge_heads(context), layer, "att.out_proj", bias=True)
        x, _ = layer_norm.reference(config.norm, under("norm1", layer), x)
        hidden = linear(x, layer, "ff.layers.0", bias=True)
        hidden = hidden * (1 + _erf(hidden / math.sqrt(2))) / 2
        x, _ = layer_norm.reference(
            config.norm, under("norm2", layer), x + linear(hidden, layer, "ff.layers.2", bias=True)
        )
    return x
