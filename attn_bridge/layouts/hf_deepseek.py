"""Hugging Face DeepSeek V2 and V3: latents instead of keys and values, experts but in the first layers."""

from __future__ import annotations

from .attention import QUERY, QUERY_LATENT, latent
from .common import HEADS
from .hf_decoder import EXPERTS, FINAL_NORM, FUSED, LAYER, OURS, attention, decoder, experts, norms
from .table import Row

LAYOUT = decoder(
    "hf-deepseek",
    "transformers DeepSeek V2 and V3",
    [
        *attention(QUERY, branch="queries/direct"),
        *attention(QUERY_LATENT, branch="queries/latent"),
        *attention(latent("num_heads", "kv_lora_rank", "qk_nope_head_dim")),
        *experts("shared_experts"),
        Row(
            f"{LAYER}mlp.gate.e_score_correction_bias",
            (f"{OURS}ff.router.correction_bias",),
            optional=True,
            branch=EXPERTS,
        ),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    settings={**FUSED, **HEADS, **{name: (name,) for name in ("kv_lora_rank", "qk_nope_head_dim")}},
    defaults={"fused": 0},
    refused={
        "{prefix}layers.{i}.eh_proj.weight": "a layer that predicts further tokens, which transformers leaves out, too",
    },
    model_types=("deepseek_v2", "deepseek_v3"),
)
