"""Qwen3-Next and Qwen3.5: in every fourth layer gated attention with norms, partly rotary; else a gated delta net.

Feed-forwards of Qwen3-Next have experts.
"""

from __future__ import annotations

from typing import Any

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.gated_delta_net import GatedDeltaNetConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ..family import AttentionLayer
from ..reading.decoders import (
    feed_forward_of,
    has_experts,
    read_feed_forward,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.grouped import head_dim_of, mask_of, read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUTS = {
    name: table("hf-qwen3-next" if name == "qwen3_next" else "hf-qwen3-5")
    for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
}
"""Model type -> table of its tensors."""


def is_dense(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer has no experts: ``mlp_only_layers`` or ``decoder_sparse_step`` makes it dense."""
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(one) is int for one in dense):
        raise TypeError(f"mlp_only_layers of {config.model_type} must be a list of integers, got {dense!r:.60}")
    return layer in dense or bool((layer + 1) % config.integer("decoder_sparse_step"))


def _read_delta_net(config: ConfigFile) -> GatedDeltaNetConfig:
    """Return the config of a gated delta net."""
    config.refuse("hidden_act", "silu", "swish")  # its convolution has it as well
    return GatedDeltaNetConfig(
        d_in=config.integer("hidden_size"),
        num_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        head_dim=config.integer("linear_key_head_dim"),
        value_head_dim=config.integer("linear_value_head_dim"),
        conv_size=config.integer("linear_conv_kernel_dim"),
        eps=config.number("rms_norm_eps"),
    )


def _read_full_attention(config: ConfigFile, layer: int) -> GroupedQueryAttentionConfig:
    """Return the config of gated attention."""
    bias = config.flag("attention_bias")
    return GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), partial=True, sections=config.model_type != "qwen3_next"),
        qk_norm=QKNorm("head", config.number("rms_norm_eps"), unit_offset=True),
        mask=mask_of(config, layer, "full_attention"),
        gate=True,
    )


def read_qwen3_next(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Qwen3-Next or Qwen3.5, of either kind."""
    is_full = (layer + 1) % config.integer("full_attention_interval") == 0
    kinds = ("full_attention", "linear_attention")
    kind = config.layer_type(layer, kinds[not is_full])
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    spec = _read_full_attention(config, layer) if kind == kinds[0] else _read_delta_net(config)
    return attention_of_layer(LAYOUTS[config.model_type], config, layer, spec)


def read_block(config: ConfigFile, layer: int, attention: Any) -> DecoderBlockConfig:
    """Return a block: experts, with gated shared layers; or dense layers.

    Qwen3.5 has one kind throughout, and normalises the weights of the experts regardless of ``norm_topk_prob``.
    """
    norm, is_next = read_rms_norm(config, unit_offset=True), config.model_type == "qwen3_next"
    if is_dense(config, layer) if is_next else config.model_type == "qwen3_5_text":
        return DecoderBlockConfig(attention, read_feed_forward(config), norm)
    expert = read_feed_forward(config, width="moe_intermediate_size")
    experts = MixtureOfExpertsConfig(
        expert,
        config.integer("num_experts"),
        config.integer("num_experts_per_tok"),
        Router(normalise=config.flag("norm_topk_prob") or not is_next),
        shared=read_feed_forward(config, width="shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return DecoderBlockConfig(attention, experts, norm)


def read_model(config: ConfigFile) -> dict[str, object]:
    """Return the rest of a model: its norm, and a head that may be tied."""
    return {"norm": read_rms_norm(config, unit_offset=True), "tie": config.flag("tie_word_embeddings")}


def write_qwen3_next(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Qwen3-Next or Qwen3.5."""
    sparse = has_experts(config)
    keys: dict[str, Any] = {"layer_types": [], "decoder_sparse_step": 1}
    keys["mlp_only_layers"] = [layer for layer, is_sparse in enumerate(sparse) if not is_sparse]
    for block in config.blocks:
        attention = block.attention
        is_linear = isinstance(attention, GatedDeltaNetConfig)
        keys["layer_types"].append("linear_attention" if is_linear else "full_attention")
        if isinstance(attention, GatedDeltaNetConfig):
            keys |= {
                "linear_num_key_heads": attention.num_heads,
                "linear_num_value_heads": attention.num_value_heads,
                "linear_key_head_dim": attention.head_dim,
                "linear_value_head_dim": attention.value_head_dim,
                "linear_conv_kernel_dim": attention.conv_size,
            }
        elif isinstance(attention, GroupedQueryAttentionConfig):
            keys |= {**write_heads(attention), **write_rotary(attention.position, attention.head_dim)}
            keys["attention_bias"] = attention.qkv_bias
    keys |= {**write_sizes(config), **write_rms_norm(config)}
    if not all(sparse):
        keys |= write_feed_forward(feed_forward_of(config, FeedForwardConfig))
    if model_type == "qwen3_5_text":
        return keys
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    if experts.shared is None:
        raise ValueError("shared layers of the experts (None) can't be left out there")
    return {
        **keys,
        **write_feed_forward(experts.shared, width="shared_expert_intermediate_size"),
        **write_feed_forward(experts.expert, width="moe_intermediate_size"),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
    }
