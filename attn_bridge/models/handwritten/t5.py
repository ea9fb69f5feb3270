"""T5, mT5 and UMT5: relative bias, scores without a scale; attention layers only.

A config is that of one stack, as `transformers` makes it: with ``is_decoder`` the decoder's, else the encoder's. In T5
and mT5, all layers use the table of biases that the first layer has; each layer of UMT5 has its own.
"""

from __future__ import annotations

from ...masks import causal, full
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.position import RelativeBias
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..reading.model_config import ConfigFile
from ..rows.attention import Table
from .grouped import attention_layer

TABLE: Table = (
    *(
        Row(f"{theirs}.weight", (f"{ours}.weight",))
        for theirs, ours in (("q", "W_query"), ("k", "W_key"), ("v", "W_value"), ("o", "out_proj"))
    ),
    Row("relative_attention_bias.weight", ("relative_bias",)),
)


def read_umt5(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return the attention of a layer to its own sequence."""
    is_decoder = config.flag("is_decoder")
    spec = GroupedQueryAttentionConfig(
        d_in=config.integer("d_model"),
        num_heads=config.integer("num_heads"),
        head_dim=config.integer("d_kv"),
        position=RelativeBias(
            config.integer("relative_attention_num_buckets"),
            config.integer("relative_attention_max_distance"),
            bidirectional=not is_decoder,
        ),
        mask=causal() if is_decoder else full(),
        scale=1.0,
        dropout=config.number_or_none("dropout_rate") or 0.0,
    )
    side = "decoder" if is_decoder else "encoder"
    return attention_layer(layer, spec, {"transformers": TABLE}, f"{side}.block.{layer}.layer.0.SelfAttention.")


def read_t5(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return the attention of the first layer, the only one that has a table of biases.

    Raises:
        ValueError: another layer.
    """
    if layer:
        raise ValueError(
            f"layer {layer} of {config.model_type} has no relative_attention_bias; only layer 0 is supported"
        )
    return read_umt5(config, layer)


COMMON = {
    "d_kv": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
}

FAMILIES = (
    Family(
        ("t5",),
        read_t5,
        {**COMMON, "d_model": 512, "num_heads": 8, "num_layers": 6},
        depth="num_layers",
    ),
    Family(("mt5",), read_t5, {**COMMON, "d_model": 512, "num_heads": 6, "num_layers": 8}, depth="num_layers"),
    Family(("umt5",), read_umt5, {**COMMON, "d_model": 512, "num_heads": 6, "num_layers": 8}, depth="num_layers"),
)
