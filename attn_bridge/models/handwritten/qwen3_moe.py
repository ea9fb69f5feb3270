"""Qwen3-MoE: Qwen 3 with experts, but for the layers that its config leaves dense."""

from __future__ import annotations

from typing import Any

from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.feed_forward import FeedForwardConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.mixture_of_experts import MixtureOfExpertsConfig, Router
from ..family import AttentionLayer, Family
from ..reading.decoders import (
    attention_of,
    feed_forward_of,
    has_experts,
    read_feed_forward,
    read_mistral_block,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary
from ..rows.attention import SPLIT
from ..rows.decoder import FINAL_NORM, FUSED, attention, decoder, experts, norms
from .grouped import attention_layer, head_dim_of, mask_of, read_sizes, window_of
from .llama import write_llama_attention


def read_qwen3_moe(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Qwen3-MoE; all of them have the window, if any."""
    bias = config.flag("attention_bias")
    slides = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), sections=True),
        qk_norm=QKNorm("head", config.number("rms_norm_eps")),
        mask=mask_of(config, layer, "sliding_attention" if slides else "full_attention"),
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def is_dense(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer has no experts: ``mlp_only_layers`` or ``decoder_sparse_step`` makes it dense."""
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(one) is int for one in dense):
        raise TypeError(f"mlp_only_layers of {config.model_type} must be a list of integers, got {dense!r:.60}")
    return layer in dense or bool((layer + 1) % config.integer("decoder_sparse_step"))


def _block(config: ConfigFile, layer: int, attention: Any) -> DecoderBlockConfig:
    """Return a block, with experts or dense."""
    if is_dense(config, layer):
        return read_mistral_block(config, layer, attention)
    mixture = MixtureOfExpertsConfig(
        read_feed_forward(config, width="moe_intermediate_size"),
        config.integer("num_experts"),
        config.integer("num_experts_per_tok"),
        Router(normalise=config.flag("norm_topk_prob")),
    )
    return DecoderBlockConfig(attention, mixture, read_rms_norm(config))


def write_qwen3_moe(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Qwen3-MoE."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    experts, sparse = feed_forward_of(config, MixtureOfExpertsConfig), has_experts(config)
    window = window_of(attention.mask)
    return {
        **write_sizes(config),
        **write_llama_attention(attention),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_sparse in enumerate(sparse) if not is_sparse],
        **({} if all(sparse) else write_feed_forward(feed_forward_of(config, FeedForwardConfig))),
        **write_feed_forward(experts.expert, width="moe_intermediate_size"),
        **write_rms_norm(config),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
    }


FAMILIES = (
    Family(
        ("qwen3_moe",),
        read_qwen3_moe,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        aliases={"num_experts": ("num_local_experts",)},
        block=_block,
        write=write_qwen3_moe,
        architecture="Qwen3MoeForCausalLM",
    ),
)


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
