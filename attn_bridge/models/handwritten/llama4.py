"""Llama 4: most layers attend within chunks and have rotary positions; the others attend to all earlier tokens.

Layers without positions scale their queries by a temperature (arXiv 2501.19399). The router's weights multiply the
inputs of experts.
"""

from __future__ import annotations

from ...masks import Mask, causal, chunked
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm, Temperature
from ..family import AttentionLayer
from ..reading.decoders import (
    WrittenKeys,
    attention_of,
    feed_forward_of,
    has_experts,
    read_feed_forward,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.grouped import head_dim_of, is_rotated, read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUT = table("hf-llama4")

_KINDS = ("full_attention", "chunked_attention")
"""Names of a layer's kind: without and with chunks."""

_ROUTER = Router("sigmoid", normalise=False, corrects="logits")


def read_llama4(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Llama 4."""
    bias, turns = config.flag("attention_bias"), is_rotated(config, layer)
    tuned = config.flag("attn_temperature_tuning") and not turns
    has_norms = config.flag("use_qk_norm") and turns
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), theta=500000.0, pairing="interleaved") if turns else None,
        qk_norm=QKNorm("head", config.number("rms_norm_eps"), rotated=True, affine=False) if has_norms else None,
        mask=_mask(config, layer, config.layer_type(layer, _KINDS[turns])),
        temperature=Temperature(config.number("attn_scale"), config.integer("floor_scale"), 1) if tuned else None,
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def _mask(config: ConfigFile, layer: int, kind: str) -> Mask:
    """Return the mask of a layer; `transformers` needs the size of a chunk even if no layer has chunks."""
    size = config.integer("attention_chunk_size")
    if kind not in _KINDS:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(_KINDS)}")
    return chunked(size) if kind == _KINDS[True] else causal()


def read_block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block: experts, and layers of the same width for every token, or wider dense layers."""
    norm, expert = read_rms_norm(config), read_feed_forward(config)
    if layer not in _sparse_layers(config):
        return DecoderBlockConfig(attention, read_feed_forward(config, width="intermediate_size_mlp"), norm)
    count, chosen = config.integer("num_local_experts"), config.integer("num_experts_per_tok")
    experts = MixtureOfExpertsConfig(expert, count, chosen, _ROUTER, shared=expert, weighs="inputs")
    return DecoderBlockConfig(attention, experts, norm)


def _sparse_layers(config: ConfigFile) -> list[int] | range:
    """Return the indices of the layers with experts: every ``interleave_moe_layer_step``-th, or those listed."""
    listed, step = config.get("moe_layers"), config.integer("interleave_moe_layer_step")
    if listed is None:
        return range(step - 1, config.integer("num_hidden_layers"), step)
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise TypeError(f"moe_layers of {config.model_type} must be a list of integers, got {listed!r:.60}")
    return listed


def write_llama4(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Llama 4."""
    first = attention_of(config, GroupedQueryAttentionConfig)
    attentions = [each.attention for each in config.blocks if isinstance(each.attention, GroupedQueryAttentionConfig)]
    if len(attentions) < len(config.blocks):
        raise ValueError("attention of a block is no GroupedQueryAttentionConfig")
    rotated = next((each for each in attentions if each.position is not None), None)
    tuned = next((each.temperature for each in attentions if each.temperature is not None), None)
    sizes = [each.mask.reach for each in attentions if each.mask != causal()]
    sparse = has_experts(config)
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_heads(first),
        **write_rms_norm(config),
        **({} if rotated is None else write_rotary(rotated.position)),
        "no_rope_layers": [int(each.position is not None) for each in attentions],
        "layer_types": [_KINDS[each.mask != causal()] for each in attentions],
        **({"attention_chunk_size": sizes[0]} if sizes else {}),
        "attention_bias": first.qkv_bias,
        "use_qk_norm": rotated is not None and rotated.qk_norm is not None,
        "attn_temperature_tuning": tuned is not None,
        **({} if tuned is None else {"attn_scale": tuned.rate, "floor_scale": tuned.interval}),
        "moe_layers": [layer for layer, is_sparse in enumerate(sparse) if is_sparse],
    }
    if not all(sparse):
        keys |= write_feed_forward(feed_forward_of(config, FeedForwardConfig), width="intermediate_size_mlp")
    if any(sparse):
        experts = feed_forward_of(config, MixtureOfExpertsConfig)
        keys |= write_feed_forward(experts.expert)
        keys |= {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}
    return keys
