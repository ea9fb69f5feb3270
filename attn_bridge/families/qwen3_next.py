"""Qwen3-Next and Qwen3.5: in every fourth layer gated attention with norms, partly rotary; else a gated delta net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..layouts.attention import Table, gated
from ..specs.gated_delta_net import GatedDeltaNetConfig
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from . import linear_attention
from .base import AttentionLayer, Family
from .grouped import attention_layer, head_dim_of, mask_of, read_sizes
from .model_config import ModelConfig
from .rotary import read_rotary


def read_full_attention(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of gated attention."""
    bias = config.flag("attention_bias")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), partial=True),
        qk_norm=QKNorm("head", config.number("rms_norm_eps"), unit_offset=True),
        mask=mask_of(config, layer, "full_attention"),
        gate=True,
    )
    return attention_layer(layer, spec, {"transformers": gated(spec.num_heads)})


def _read(config: ModelConfig, layer: int, table: Callable[[GatedDeltaNetConfig], Table]) -> AttentionLayer:
    """Return a layer of either kind; `table` has the tensors of a gated delta net."""
    is_full = (layer + 1) % config.integer("full_attention_interval") == 0
    kind = config.layer_type(layer, "full_attention" if is_full else "linear_attention")
    kinds = {"full_attention": read_full_attention, "linear_attention": linear_attention.reader(table)}
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    return kinds[kind](config, layer)


def read_qwen3_next(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of Qwen3-Next."""
    return _read(config, layer, linear_attention.grouped_table)


def read_qwen3_5(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of Qwen3.5 on text, where its three kinds of positions are one."""
    return _read(config, layer, linear_attention.split_table)


_ALIKE: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    **linear_attention.DEFAULTS,
}

FAMILIES = (
    Family(("qwen3_next",), read_qwen3_next, {**_ALIKE, "hidden_size": 2048, "num_hidden_layers": 48}),
    Family(
        ("qwen3_5_text",),
        read_qwen3_5,
        {**_ALIKE, "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4},
    ),
    Family(("qwen3_5_moe_text",), read_qwen3_5, {**_ALIKE, "hidden_size": 2048, "num_hidden_layers": 40}),
)
