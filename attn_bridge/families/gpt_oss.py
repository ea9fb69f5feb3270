"""gpt-oss: learned sinks, biases everywhere, a window in every other layer, YaRN."""

from __future__ import annotations

from typing import Any

from ..layouts import Row
from ..layouts.attention import SINKS, SPLIT, Table
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig
from .base import AttentionLayer, Family
from .grouped import attention_layer, head_dim_of, mask_of, read_sizes
from .model_config import ModelConfig
from .rotary import make_rotary, read_rotary


def _fused(leaf: str) -> Row:
    parts = tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value"))
    return Row(f"qkv.{leaf}", parts, "o ... -> o ...", along="o")


OPENAI: Table = (
    _fused("weight"),
    _fused("bias"),
    Row("out.weight", ("out_proj.weight",)),
    Row("out.bias", ("out_proj.bias",)),
    SINKS,
    Row("norm.scale", reason="the norm before attention"),
)
"""The names of OpenAI's own files, below ``block.0.attn.``: query, key and value lie one after the other."""

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of gpt-oss."""
    bias = config.flag("attention_bias")
    kind = config.layer_type(layer, "full_attention" if layer % 2 else "sliding_attention")
    head_dim, base = head_dim_of(config), config.get("rope_theta")
    says_rotary = any(config.get(key) for key in ("rope_parameters", "rope_scaling"))
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim, kind, theta=150000.0)
        if says_rotary
        else make_rotary(config, head_dim, _YARN, 150000.0 if base is None else base),
        mask=mask_of(config, layer, kind),
        sinks=True,
    )
    return attention_layer(layer, spec, {"transformers": (*SPLIT, SINKS), "openai": OPENAI})


FAMILIES = (
    Family(
        ("gpt_oss",),
        read_gpt_oss,
        {
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_hidden_layers": 36,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "attention_bias": True,
        },
    ),
)
