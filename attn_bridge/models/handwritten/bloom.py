"""Tensors of BLOOM: a projection with query, key and value head by head, a norm of the embedding."""

from __future__ import annotations

from ...weights.rows import Row
from ..layout import Layout
from ..rows.attention import below, by_head
from ..rows.common import HEADS, TIE, layer_norm, with_bias

BLOCK, OURS = "{prefix}h.{i}.", "trf_blocks.{i}."

LAYOUT = Layout(
    "hf-bloom",
    "transformers BLOOM",
    [
        Row("{prefix}word_embeddings.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        *layer_norm("{prefix}word_embeddings_layernorm", "emb_norm"),
        *below(by_head("num_heads"), f"{BLOCK}self_attention.", f"{OURS}att."),
        *with_bias(f"{BLOCK}mlp.dense_h_to_4h", f"{OURS}ff.layers.0"),
        *with_bias(f"{BLOCK}mlp.dense_4h_to_h", f"{OURS}ff.layers.2"),
        *layer_norm(f"{BLOCK}input_layernorm", f"{OURS}norm1"),
        *layer_norm(f"{BLOCK}post_attention_layernorm", f"{OURS}norm2"),
        *layer_norm("{prefix}ln_f", "final_norm"),
    ],
    prefixes=("transformer.", ""),
    settings={**TIE, **HEADS},
    defaults={"tie": 1},
    whole=True,
    model_types=("bloom",),
)
