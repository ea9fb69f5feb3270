"""BLOOM: ALiBi, and query, key and value of a head after one another in one projection."""

from __future__ import annotations

from ..layouts.attention import by_head
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig
from ..specs.position import Alibi
from .base import AttentionLayer, Family
from .grouped import attention_layer
from .model_config import ModelConfig


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
        layer, spec, {"transformers": by_head(heads)}, prefix=f"transformer.h.{layer}.self_attention."
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
