"""Hugging Face Qwen3-Next: a gated delta net in three of four layers, gated attention in the fourth, experts."""

from __future__ import annotations

from .attention import below, delta_net_by_head, gated
from .hf_decoder import (
    EMBEDDINGS,
    EXPERTS,
    FINAL_NORM,
    FUSED,
    HEADS,
    LAYER,
    OURS,
    QUANTISED,
    TIE,
    attention,
    experts,
    norms,
)
from .layout import Layout
from .table import Row

LAYOUT = Layout(
    "hf-qwen3-next",
    "transformers Qwen3-Next",
    [
        *EMBEDDINGS,
        *below(
            delta_net_by_head("linear_num_key_heads", "linear_key_head_dim"),
            f"{LAYER}linear_attn.",
            f"{OURS}linear_att.",
            branch="attention/linear",
        ),
        *attention(gated("num_heads"), required=("q_norm", "k_norm"), branch="attention/full"),
        *experts("shared_expert"),
        Row(f"{LAYER}mlp.shared_expert_gate.weight", (f"{OURS}ff.shared_gate.weight",), branch=EXPERTS),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
        Row("mtp.{rest}", reason="predicts further tokens, which transformers leaves out, too"),
    ],
    prefixes=("model.", ""),
    settings={**TIE, **FUSED, **HEADS, **{name: (name,) for name in ("linear_num_key_heads", "linear_key_head_dim")}},
    defaults={"tie": 0, "fused": 0},
    whole=True,
    mark="linear_attn.",
    refused=QUANTISED,
    model_types=("qwen3_next",),
)
