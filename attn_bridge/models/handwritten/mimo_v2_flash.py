"""MiMo-V2-Flash: narrow, scaled values; windows with sinks and twice the key/value heads; experts."""

from __future__ import annotations

from collections.abc import Mapping

from ...printable import printable
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import ExpertGroups, MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ..family import AttentionLayer
from ..reading.decoders import NAMES, WrittenKeys, activation_of, read_rms_norm, write_rms_norm, write_sizes
from ..reading.grouped import KINDS, mask_of, window_of
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_nested_rotary, rope_type, write_nested
from ..tables import table
from ..tables.layers import attention_of_layer
from .gemma4 import plain

FEEDS = ("dense", "sparse")
"""Kinds of feed-forward layers: without experts, and with them."""

PART = 0.334
"""Part of a head that turns where a config has none."""


def prepare(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with the width of the window, and with the part of a head that turns."""
    prepared = dict(keys)
    if "num_local_experts" in keys:
        prepared["n_routed_experts"] = keys["num_local_experts"]
    size = keys.get("sliding_window_size")
    if type(size) is int:
        prepared["sliding_window"] = size + 1
    rotary = keys.get("rope_parameters")
    if isinstance(rotary, Mapping):
        prepared["rope_parameters"] = {
            kind: {"partial_rotary_factor": PART, **values}
            if isinstance(values, Mapping) and rope_type(values) == "default"
            else values
            for kind, values in rotary.items()
        }
    return prepared


def read_mimo(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return attention in full, or in a window with sinks."""
    kind = config.layer_type(layer, KINDS[layer != 0 and (layer + 1) % 6 != 0])
    mask, head_dim = mask_of(config, layer, kind), config.integer("head_dim")
    spec = GroupedQueryAttentionConfig(
        config.integer("hidden_size"),
        config.integer("num_attention_heads"),
        config.integer("num_key_value_heads") * (2 if kind == KINDS[True] else 1),
        head_dim,
        qkv_bias=config.flag("attention_bias"),
        dropout=config.number_or_none("attention_dropout") or 0.0,
        position=read_nested_rotary(config, head_dim, kind, partial=True),
        mask=mask,
        sinks=kind == KINDS[True],
        value_dim=config.integer("v_head_dim"),
        value_scale=1.0 if config.get("attention_value_scale") is None else config.positive("attention_value_scale"),
    )
    return attention_of_layer(table("hf-mimo-v2-flash"), config, layer, spec)


def read_block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block, dense or with experts."""
    width, activation, norm = config.integer("hidden_size"), activation_of(config), read_rms_norm(config)
    if not _is_sparse(config, layer):
        layers = FeedForwardConfig(width, config.integer("intermediate_size"), activation)
        return DecoderBlockConfig(attention, layers, norm)
    number = config.integer("n_group")
    scale = 1.0 if config.get("routed_scaling_factor") is None else config.positive("routed_scaling_factor")
    router = Router(
        "sigmoid",
        normalise=config.flag("norm_topk_prob"),
        scale=scale,
        correction=True,
        groups=None if number == 1 else ExpertGroups(number, config.integer("topk_group"), "top2"),
    )
    expert = FeedForwardConfig(width, config.integer("moe_intermediate_size"), plain(activation))
    counts = config.integer("n_routed_experts"), config.integer("num_experts_per_tok")
    return DecoderBlockConfig(attention, MixtureOfExpertsConfig(expert, *counts, router), norm)


def _is_sparse(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer has experts.

    Raises:
        ValueError: ``mlp_layer_types`` has no known kind for the layer.
    """
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return layer > 0
    if not isinstance(kinds, list | tuple) or len(kinds) <= layer or kinds[layer] not in FEEDS:
        excerpt = printable(repr(kinds), 60)
        raise ValueError(f"mlp_layer_types ({excerpt}) must be a list with 'dense' or 'sparse' for layer {layer}")
    return bool(kinds[layer] == FEEDS[True])


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: its norm, and a head that may be tied.

    Raises:
        ValueError: no layer has experts.
    """
    if not any(_is_sparse(config, layer) for layer in range(config.integer("num_hidden_layers"))):
        # Its tensors would be those of another family, whose layout claims them.
        raise ValueError(f"no layer of {config.model_type} has experts, which needs at least one")
    return {"norm": read_rms_norm(config), "tie": config.flag("tie_word_embeddings")}


def write_mimo(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of MiMo-V2-Flash."""
    attentions = [each for block in config.blocks if isinstance(each := block.attention, GroupedQueryAttentionConfig)]
    if len(attentions) < len(config.blocks):
        raise ValueError(f"attention that is not grouped-query attention is not one of {model_type}")
    windows = [window_of(each.mask) for each in attentions]
    kinds = [KINDS[window is not None] for window in windows]
    first = attentions[0]
    positions = {kind: each.position for kind, each in reversed([*zip(kinds, attentions, strict=True)])}
    window = next((window for window in windows if window is not None), None)
    layers = [block.feed_forward for block in config.blocks]
    sparse = [isinstance(layer, MixtureOfExpertsConfig) for layer in layers]
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_rms_norm(config),
        **write_nested(positions, first.head_dim),
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads // (1 if windows[0] is None else 2),
        "head_dim": first.head_dim,
        "v_head_dim": first.value_width,
        "attention_value_scale": first.value_scale,
        "attention_bias": first.qkv_bias,
        "attention_dropout": first.dropout,
        "layer_types": kinds,
        "mlp_layer_types": [FEEDS[is_sparse] for is_sparse in sparse],
        **({} if window is None else {"sliding_window": window}),
    }
    for layer in layers:
        if isinstance(layer, FeedForwardConfig):
            keys |= {"intermediate_size": layer.hidden_dim, "hidden_act": NAMES[layer.activation]}
        elif isinstance(layer, MixtureOfExpertsConfig):
            groups = layer.router.groups
            keys |= {
                "moe_intermediate_size": layer.expert.hidden_dim,
                "hidden_act": NAMES[layer.expert.activation],
                "n_routed_experts": layer.num_experts,
                "num_experts_per_tok": layer.top_k,
                "norm_topk_prob": layer.router.normalise,
                "routed_scaling_factor": layer.router.scale,
                "n_group": 1 if groups is None else groups.number,
                "topk_group": 1 if groups is None else groups.chosen,
            }
    return keys
