"""Qwen3-MoE: its tensors, and which layers its config leaves dense."""

from __future__ import annotations

from ..reading.model_config import ConfigFile
from ..rows.attention import SPLIT
from ..rows.decoder import FINAL_NORM, FUSED, attention, decoder, experts, norms


def is_dense(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer has no experts: ``mlp_only_layers`` or ``decoder_sparse_step`` makes it dense."""
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(one) is int for one in dense):
        raise TypeError(f"mlp_only_layers of {config.model_type} must be a list of integers, got {dense!r:.60}")
    return layer in dense or bool((layer + 1) % config.integer("decoder_sparse_step"))


LAYOUT = decoder(
    "hf-qwen3-moe",
    "transformers Qwen3-MoE",
    [
        *attention(SPLIT, required=("q_norm", "k_norm")),
        *experts(),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    settings=FUSED,
    defaults={"fused": 0},
    marks=("mlp.experts.",),
    model_types=("qwen3_moe",),
)
