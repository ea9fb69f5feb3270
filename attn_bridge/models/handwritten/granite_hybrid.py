"""Granite 4: Granite whose layers are those of Mamba-2 or attention, in most models without positions.

Feed-forward layers are dense, or experts with shared layers.
"""

from __future__ import annotations

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.mamba2 import Mamba2Config
from ..family import AttentionLayer
from ..reading.decoders import (
    WrittenKeys,
    feed_forward_of,
    has_experts,
    inverse,
    read_feed_forward,
    read_llama_model,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.grouped import head_dim_of, read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer
from .mamba2 import Keys, read_config, write_layer

LAYOUT = table("hf-granitemoehybrid")  # whose layers without experts have the same attention

_KINDS = ("linear_attention", "full_attention")


def read_granite_hybrid(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Granite 4; without ``layer_types`` it is one of Mamba-2."""
    kind = config.layer_type(layer, "linear_attention")
    if kind in ("linear_attention", "mamba"):
        return attention_of_layer(LAYOUT, config, layer, read_config(config, Keys()))
    if kind != "full_attention":
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(_KINDS)}")
    bias = config.flag("attention_bias")
    is_rotary = config.get("position_embedding_type") == "rope"
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config)) if is_rotary else None,
        scale=config.positive("attention_multiplier"),
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Granite 4, whose router takes the softmax over the chosen experts."""
    shared: FeedForwardConfig = read_feed_forward(config, width="shared_intermediate_size")
    layers: FeedForwardConfig | MixtureOfExpertsConfig = shared
    if config.integer("num_local_experts", 0):
        layers = MixtureOfExpertsConfig(
            read_feed_forward(config),
            config.integer("num_local_experts"),
            config.integer("num_experts_per_tok"),
            shared=shared,
        )
    scale = config.positive("residual_multiplier")
    return DecoderBlockConfig(attention, layers, read_rms_norm(config), residual_scale=scale)


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: that of Llama, and factors of embeddings and logits."""
    return {
        **read_llama_model(config),
        "embedding_scale": config.positive("embedding_multiplier"),
        "logit_scale": 1.0 / config.positive("logits_scaling"),
    }


def write_granite_hybrid(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Granite 4."""
    is_full = [isinstance(block.attention, GroupedQueryAttentionConfig) for block in config.blocks]
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_rms_norm(config),
        "residual_multiplier": config.blocks[0].residual_scale,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": inverse(lambda value: 1.0 / value, config.logit_scale, 1.0 / config.logit_scale),
        "layer_types": [_KINDS[full] for full in is_full],
    }
    if any(isinstance(block.attention, Mamba2Config) for block in config.blocks):
        keys |= write_layer(config, Keys())
    if any(is_full):
        attention = next(
            block.attention for block in config.blocks if isinstance(block.attention, GroupedQueryAttentionConfig)
        )
        keys |= {
            **write_heads(attention),
            **write_rotary(attention.position),
            "position_embedding_type": None if attention.position is None else "rope",
            "attention_bias": attention.qkv_bias,
            "attention_multiplier": attention.scale,
        }
    if not any(has_experts(config)):
        shared = feed_forward_of(config, FeedForwardConfig)
        return {**keys, **write_feed_forward(shared, width="shared_intermediate_size"), "num_local_experts": 0}
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    if experts.shared is None:
        raise ValueError("shared layers of the experts (None) can't be left out there")
    return {
        **keys,
        **write_feed_forward(experts.shared, width="shared_intermediate_size"),
        **write_feed_forward(experts.expert),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }
