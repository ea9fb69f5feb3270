"""BLOOM: ALiBi, and query, key and value of a head after one another in one projection."""

from __future__ import annotations

from ..layouts import Row
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig
from ..specs.position import Alibi
from .base import AttentionLayer, Family, Table
from .grouped import attention_layer
from .model_config import ModelConfig


def _table(num_heads: int) -> Table:
    def fused(leaf: str) -> Row:
        parts = tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value"))
        return Row(f"query_key_value.{leaf}", parts, "(h c) ... -> (h part c) ...", part="part", sizes={"h": num_heads})

    return (
        fused("weight"),
        fused("bias"),
        Row("dense.weight", ("out_proj.weight",)),
        Row("dense.bias", ("out_proj.bias",)),
    )


def read_bloom(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of BLOOM."""
    heads = config.integer("num_attention_heads")
    spec = GroupedQueryAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        qkv_bias=True,
        out_bias=True,
        position=Alibi(),
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )
    return attention_layer(
        layer, spec, {"transformers": _table(heads)}, prefix=f"transformer.h.{layer}.self_attention."
    )


FAMILIES = (
    Family(
        ("bloom",),
        read_bloom,
        {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2},
        aliases={
            "num_attention_heads": ("n_head",),
            "num_hidden_layers": ("n_layer",),
            "hidden_size": ("n_embed",),
        },
    ),
)
