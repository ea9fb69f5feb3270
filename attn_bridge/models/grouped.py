"""What families with grouped queries have in common: sizes, masks, and tables of split projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..masks import Mask, causal, sliding_window
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig
from .family import AttentionLayer
from .reading.model_config import ModelConfig
from .rows.attention import Table


def read_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments that every family says alike: widths, heads, dropout."""
    heads = config.integer("num_attention_heads")
    width = config.integer("hidden_size")
    return {
        "d_in": width,
        "num_heads": heads,
        "num_kv_heads": config.integer_or_none("num_key_value_heads"),
        "head_dim": config.integer_or_none("head_dim"),
        "dropout": config.number_or_none("attention_dropout") or 0.0,
    }


def head_dim_of(config: ModelConfig) -> int:
    """Return the width of a head."""
    given = config.integer_or_none("head_dim")
    return config.integer("hidden_size") // config.integer("num_attention_heads") if given is None else given


def mask_of(config: ModelConfig, layer: int, kind: str) -> Mask:
    """Return the mask of a layer of that kind.

    Raises:
        ValueError: a kind that is not known, or a layer with a window in a config without.
    """
    if kind == "full_attention":
        return causal()
    if kind != "sliding_attention":
        raise ValueError(
            f"layer {layer} of {config.model_type} is of type {kind}, which must be full_attention or sliding_attention"
        )
    if config.get("sliding_window") is None:
        raise ValueError(f"layer {layer} of {config.model_type} is sliding_attention, but sliding_window is null")
    return sliding_window(config.integer("sliding_window"))


def attention_layer(
    layer: int, config: GroupedQueryAttentionConfig, tables: Mapping[str, Table], prefix: str = ""
) -> AttentionLayer:
    """Return a layer of grouped-query attention; its prefix is that of Llama by default."""
    return AttentionLayer("GroupedQueryAttention", config, layer, tables, prefix or f"model.layers.{layer}.self_attn.")
