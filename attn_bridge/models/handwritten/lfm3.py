"""LFM3: the gated short convolutions of LFM2, and attention with gates, in full and in a window, between two norms."""

from __future__ import annotations

from collections.abc import Mapping

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig, Norms
from ...specs.gated_convolution import GatedConvolutionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.rms_norm import RMSNormConfig
from ..family import AttentionLayer
from ..reading.decoders import WrittenKeys, feed_forward_of, write_sizes
from ..reading.grouped import KINDS, head_dim_of, mask_of, read_sizes, window_of, write_heads
from ..reading.model_config import ConfigFile
from ..tables import table
from ..tables.layers import attention_of_layer
from .gemma4 import rotary_of, write_positions

CONV = "conv"
"""Kind of a layer with a convolution."""


def prepare(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with the constant of norms under its own name, over which the usual one takes precedence."""
    return {**keys, "norm_eps": keys["rms_norm_eps"]} if "rms_norm_eps" in keys else keys


def kind_of(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer: a convolution, or attention in full or in a window.

    Raises:
        ValueError: an unknown kind.
    """
    usual = KINDS[False] if layer % 4 == 2 else KINDS[True] if layer and layer % 4 == 0 else CONV
    kind = config.layer_type(layer, usual)
    if kind not in (CONV, *KINDS):
        raise ValueError(
            f"layer {layer} of {config.model_type} is of type {kind}, which must be {CONV}, {KINDS[0]} or {KINDS[1]}"
        )
    return kind


def read_lfm3(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a gated convolution, or attention with norms of queries and keys and a gate per head."""
    layout, kind = table("hf-lfm3"), kind_of(config, layer)
    if kind == CONV:
        spec = GatedConvolutionConfig(
            config.integer("hidden_size"), conv_size=config.integer("conv_L_cache"), bias=config.flag("conv_bias")
        )
        return attention_of_layer(layout, config, layer, spec)
    bias, has_gate = config.flag("attention_bias"), config.flag("use_attention_gate")
    if bias and has_gate:
        raise ValueError(f"attention_bias of {config.model_type} is not supported with use_attention_gate")
    attention = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm("head", config.positive("norm_eps")),
        position=rotary_of(config, head_dim_of(config), kind),
        mask=mask_of(config, layer, kind),
        gate=has_gate,
        gate_scope="head" if has_gate else "channel",
    )
    return attention_of_layer(layout, config, layer, attention)


def _norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("norm_eps"))


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block, whose activation is SiLU whatever the config."""
    layers = FeedForwardConfig(config.integer("hidden_size"), config.integer("intermediate_size"), "silu")
    norms: Norms = "sandwich" if config.flag("use_sandwich_norm") else "pre"
    return DecoderBlockConfig(attention, layers, _norm(config), norms=norms)


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: its norm, and a head that may be tied."""
    return {"norm": _norm(config), "tie": config.flag("tie_word_embeddings")}


def write_lfm3(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of LFM3."""
    keys: WrittenKeys = {
        **write_sizes(config),
        "norm_eps": config.blocks[0].norm.eps,
        "intermediate_size": feed_forward_of(config, FeedForwardConfig).hidden_dim,
        "use_sandwich_norm": config.blocks[0].norms == "sandwich",
    }
    kinds: list[str] = []
    positions: dict[str, object] = {}
    for block in config.blocks:
        layer = block.attention
        if isinstance(layer, GatedConvolutionConfig):
            kinds.append(CONV)
            keys |= {"conv_L_cache": layer.conv_size, "conv_bias": layer.bias}
        elif isinstance(layer, GroupedQueryAttentionConfig):
            window = window_of(layer.mask)
            kinds.append(KINDS[window is not None])
            positions.setdefault(kinds[-1], layer.position)
            keys |= {**write_heads(layer), "attention_bias": layer.qkv_bias, "use_attention_gate": layer.gate}
            keys |= {} if window is None else {"sliding_window": window}
        else:
            raise ValueError(f"attention ({type(layer).__name__}) of a block is not one of {model_type}")
    return {**keys, "layer_types": kinds, "rope_parameters": write_positions(positions)}
