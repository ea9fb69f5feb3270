"""Qwen3-Next: gated attention with norms and partly rotary positions in every fourth layer, a gated delta net else."""

from __future__ import annotations

from ..layouts import Row
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from . import linear_attention
from .base import AttentionLayer, Family, Table
from .grouped import SPLIT, attention_layer, head_dim_of, mask_of, read_sizes
from .model_config import ModelConfig
from .rotary import read_rotary


def gated_table(num_heads: int) -> Table:
    """Return the table of attention whose projection of queries holds each head's query, then its gate."""

    def gated(leaf: str) -> Row:
        parts = (f"W_query.{leaf}", f"W_gate.{leaf}")
        return Row(f"q_proj.{leaf}", parts, "(h c) ... -> (h part c) ...", part="part", sizes={"h": num_heads})

    return (gated("weight"), gated("bias"), *(row for row in SPLIT if not row.theirs.startswith("q_proj.")))


def read_full_attention(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of gated attention."""
    bias = config.flag("attention_bias")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config)),
        qk_norm=QKNorm("head", config.number("rms_norm_eps"), unit_offset=True),
        mask=mask_of(config, layer, "full_attention"),
        gate=True,
    )
    return attention_layer(layer, spec, {"transformers": gated_table(spec.num_heads)})


def read_qwen3_next(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return a layer of Qwen3-Next, of either kind."""
    is_full = (layer + 1) % config.integer("full_attention_interval") == 0
    kind = config.layer_type(layer, "full_attention" if is_full else "linear_attention")
    if kind not in _KINDS:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(_KINDS)}")
    return _KINDS[kind](config, layer)


_KINDS = {
    "full_attention": read_full_attention,
    "linear_attention": linear_attention.reader(linear_attention.grouped_table),
}

FAMILIES = (
    Family(
        ("qwen3_next",),
        read_qwen3_next,
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_hidden_layers": 48,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            **linear_attention.DEFAULTS,
        },
    ),
)
