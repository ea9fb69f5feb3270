"""LFM2 (arXiv 2511.23404): gated short convolutions, and attention in some layers; dense, or with experts."""

from __future__ import annotations

from collections.abc import Mapping

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.gated_convolution import GatedConvolutionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.rms_norm import RMSNormConfig
from ..family import AttentionLayer
from ..reading.decoders import WrittenKeys, feed_forward_of, has_experts, write_sizes
from ..reading.grouped import head_dim_of, read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

_SUM_EPS = 1e-6
"""Constant added to the sum of the weights of the chosen experts, whatever the config."""


def prepare(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys under their newer names, over which the older ones of files take precedence."""
    newer = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    if keys.get("model_type") == "lfm2_moe":
        del newer["block_ff_dim"]
    return {**keys, **{new: keys[old] for old, new in newer.items() if old in keys}}


def _is_convolution(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer is a convolution.

    Raises:
        ValueError: the layer is of an unknown kind.
    """
    attending = config.get("full_attn_idxs") if config.model_type == "lfm2" else None
    kind = config.layer_type(layer, "full_attention" if attending is None or layer in attending else "conv")
    if kind not in ("conv", "full_attention"):
        raise ValueError(
            f"layer {layer} of {config.model_type} is of type {kind}, which must be conv or full_attention"
        )
    return kind == "conv"


def read_lfm2(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a gated convolution, or attention with norms of queries and keys."""
    layout = table("hf-lfm2" if config.model_type == "lfm2" else "hf-lfm2-moe")
    if _is_convolution(config, layer):
        spec = GatedConvolutionConfig(
            config.integer("hidden_size"), conv_size=config.integer("conv_L_cache"), bias=config.flag("conv_bias")
        )
        return attention_of_layer(layout, config, layer, spec)
    attention = GroupedQueryAttentionConfig(
        **read_sizes(config) | {"dropout": 0.0},  # transformers passes over attention_dropout
        qk_norm=QKNorm("head", config.positive("norm_eps")),
        position=read_rotary(config, head_dim_of(config)),
    )
    return attention_of_layer(layout, config, layer, attention)


def _width(config: ConfigFile) -> int:
    """Return the width of the dense feed-forward layers, of which LFM2 may take two thirds, rounded up."""
    width = config.integer("intermediate_size")
    if config.model_type != "lfm2" or not config.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return width
    multiple = config.integer("block_multiple_of")
    return -(-int(config.positive("block_ffn_dim_multiplier") * width) // multiple) * multiple


def _norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("norm_eps"))


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of LFM2, whose activation is SiLU whatever the config."""
    d_in = config.integer("hidden_size")
    layers: FeedForwardConfig | MixtureOfExpertsConfig = FeedForwardConfig(d_in, _width(config), "silu")
    if config.model_type == "lfm2_moe" and layer >= config.integer("num_dense_layers", 0):
        layers = MixtureOfExpertsConfig(
            FeedForwardConfig(d_in, config.integer("moe_intermediate_size"), "silu"),
            config.integer("num_experts"),
            config.integer("num_experts_per_tok"),
            Router(
                "sigmoid",
                normalise=config.flag("norm_topk_prob"),
                scale=config.positive("routed_scaling_factor"),
                correction=config.flag("use_expert_bias"),
                sum_eps=_SUM_EPS if config.flag("norm_topk_prob") else 0.0,
            ),
        )
    return DecoderBlockConfig(attention, layers, _norm(config))


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: its norm, and a head that may be tied."""
    return {"norm": _norm(config), "tie": config.flag("tie_word_embeddings")}


def write_lfm2(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of LFM2."""
    names = {GroupedQueryAttentionConfig: "full_attention", GatedConvolutionConfig: "conv"}
    keys: WrittenKeys = {
        **write_sizes(config),
        "norm_eps": config.blocks[0].norm.eps,
        "layer_types": [names.get(type(block.attention), "") for block in config.blocks],
    }
    for block in config.blocks:
        layer = block.attention
        if isinstance(layer, GroupedQueryAttentionConfig):
            heads = {key: value for key, value in write_heads(layer).items() if key != "attention_dropout"}
            keys |= {**heads, **write_rotary(layer.position, layer.head_dim)}
        elif isinstance(layer, GatedConvolutionConfig):
            keys |= {"conv_L_cache": layer.conv_size, "conv_bias": layer.bias}
        if isinstance(block.feed_forward, FeedForwardConfig):
            keys["intermediate_size"] = block.feed_forward.hidden_dim
    if model_type == "lfm2":
        return {**keys, "block_auto_adjust_ff_dim": False}
    sparse = has_experts(config)
    keys["num_dense_layers"] = sparse.index(True) if any(sparse) else len(sparse)
    if not any(sparse):
        return keys
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    return {
        **keys,
        "moe_intermediate_size": experts.expert.hidden_dim,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
        "routed_scaling_factor": experts.router.scale,
        "use_expert_bias": experts.router.correction,
    }
