"""Hugging Face Qwen3-Next: a gated delta net in three of four layers, gated attention in the fourth, experts."""

from __future__ import annotations

from .attention import below, delta_net_by_head, gated
from .common import HEADS
from .hf_decoder import EXPERTS, FINAL_NORM, FUSED, LAYER, OURS, attention, decoder, experts, norms
from .table import Row

LAYOUT = decoder(
    "hf-qwen3-next",
    "transformers Qwen3-Next",
    [
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
    settings={**FUSED, **HEADS, **{name: (name,) for name in ("linear_num_key_heads", "linear_key_head_dim")}},
    defaults={"fused": 0},
    mark="linear_attn.",
    model_types=("qwen3_next",),
)
