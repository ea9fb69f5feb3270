"""Cohere 2 with experts: attention and experts side by side, windows with rotary positions, all of the text without.

The first layers may be dense; they may have rotary positions without a window as well.
"""

from __future__ import annotations

import dataclasses

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig, Norm
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.layer_norm import LayerNormConfig
from ...specs.rms_norm import RMSNormConfig
from ..derived.experts import is_sparse_there
from ..family import AttentionLayer
from ..reading.decoders import (
    KINDS,
    WrittenKeys,
    attention_of,
    feed_forward_of,
    has_experts,
    head_dim_of,
    mask_of,
    read_feed_forward,
    read_sizes,
    write_feed_forward,
    write_heads,
    write_sizes,
    write_windows,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUT = table("hf-cohere2-moe")

_FULL, _SLIDING = KINDS
_DENSE, _SPARSE = "dense", "sparse"


def read_cohere2_moe(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Cohere 2 with experts."""
    config.refuse("rope_scaling", None)  # which transformers passes over
    bias, kind = config.flag("attention_bias"), config.layer_type(layer, _usual_kind(config, layer))
    turns = kind == _SLIDING or (not is_sparse_there(config, layer) and config.integer(_PREFIX_PATTERN) == 1)
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), pairing="interleaved") if turns else None,
        mask=mask_of(config, layer, kind),
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


_PREFIX_PATTERN = "prefix_dense_sliding_window_pattern"


def _usual_kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer without ``layer_types``; dense layers in front have a separate pattern."""
    dense = config.integer("first_k_dense_replace", 0)
    at, key = (layer, _PREFIX_PATTERN) if layer < dense else (layer - dense, "sliding_window_pattern")
    return KINDS[(at + 1) % config.integer(key) != 0]


def _norm(config: ConfigFile) -> Norm:
    """Return the norms, which are those of Cohere 2 if the config has no ``rms_norm_eps``."""
    width = config.integer("hidden_size")
    if config.get("rms_norm_eps") is None:
        return LayerNormConfig(width, config.number("layer_norm_eps"), bias=False)
    return RMSNormConfig(width, config.number("rms_norm_eps"))


def read_block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block; the average of the outputs of experts and shared layers is half of each."""
    expert, has_width = read_feed_forward(config), config.get("prefix_dense_intermediate_size") is not None
    if not is_sparse_there(config, layer):
        dense = read_feed_forward(config, width="prefix_dense_intermediate_size") if has_width else expert
        return DecoderBlockConfig(attention, dense, _norm(config), norms="parallel")
    config.refuse("expert_selection_fn", "softmax", "sigmoid")
    config.refuse("shared_expert_combination_strategy", "average", "sum")
    number, is_sigmoid = config.integer("num_shared_experts", 0), config.get("expert_selection_fn") == "sigmoid"
    share = 0.5 if number and config.get("shared_expert_combination_strategy") == "average" else 1.0
    router = Router(
        "sigmoid" if is_sigmoid else "softmax",
        normalise=not is_sigmoid or config.flag("norm_topk_prob"),
        scale=share,
        corrects="logits",
    )
    shared = dataclasses.replace(expert, hidden_dim=expert.hidden_dim * max(number, 1), scales=(1.0, share))
    mixture = MixtureOfExpertsConfig(
        expert,
        config.integer("num_experts"),
        config.integer("num_experts_per_tok"),
        router,
        shared=shared if number else None,
    )
    return DecoderBlockConfig(attention, mixture, _norm(config), norms="parallel")


def read_model(config: ConfigFile) -> dict[str, object]:
    """Return the rest of a model: its norm, a head that may be tied, and a factor of the logits."""
    return {
        "norm": _norm(config),
        "tie": config.flag("tie_word_embeddings"),
        "logit_scale": config.positive("logit_scale"),
    }


def write_cohere2_moe(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Cohere 2 with experts."""
    attention, sparse = attention_of(config, GroupedQueryAttentionConfig), has_experts(config)
    kinds = list(zip(config.blocks, sparse, strict=True))
    positions = [getattr(block.attention, "position", None) for block in config.blocks]
    windows = write_windows(config)
    forced = any(
        not is_sparse and position is not None and kind == _FULL
        for (_, is_sparse), position, kind in zip(kinds, positions, windows["layer_types"], strict=True)
    )
    eps = config.blocks[0].norm.eps
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_heads(attention),
        **_write_positions(next((each for each in positions if each is not None), None)),
        **windows,
        "attention_bias": attention.qkv_bias,
        **({"rms_norm_eps": eps} if isinstance(config.norm, RMSNormConfig) else {"layer_norm_eps": eps}),
        "logit_scale": config.logit_scale,
        "mlp_layer_types": [_SPARSE if is_sparse else _DENSE for is_sparse in sparse],
        _PREFIX_PATTERN: 1 if forced else 2,
    }
    if not all(sparse):
        layers = feed_forward_of(config, FeedForwardConfig)
        keys |= write_feed_forward(layers, width="prefix_dense_intermediate_size")
    if any(sparse):
        keys |= _write_experts(feed_forward_of(config, MixtureOfExpertsConfig))
    return keys


def _write_positions(position: object) -> WrittenKeys:
    """Return the keys of rotary positions, which `transformers` reads from ``rope_parameters`` alone."""
    keys = write_rotary(position)
    if keys:
        scaling = keys.pop("rope_scaling") or {"rope_type": "default"}
        keys["rope_parameters"] = {"rope_theta": keys.pop("rope_theta"), **scaling}
    return keys


def _write_experts(experts: MixtureOfExpertsConfig) -> WrittenKeys:
    """Return the keys of the experts."""
    shared, width = experts.shared, experts.expert.hidden_dim
    if shared is not None and shared.hidden_dim % width:
        raise ValueError(f"width of shared layers ({shared.hidden_dim}) must be a multiple of the experts' ({width})")
    return {
        **write_feed_forward(experts.expert),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "num_shared_experts": 0 if shared is None else shared.hidden_dim // width,
        "shared_expert_combination_strategy": "sum" if experts.router.scale == 1.0 else "average",
        "expert_selection_fn": experts.router.scores,
        "norm_topk_prob": experts.router.normalise,
    }
