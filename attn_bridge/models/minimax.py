"""MiniMax-01 (arXiv 2501.08313): lightning attention, and in some layers grouped-query attention as in Mixtral."""

from __future__ import annotations

from ..specs.lightning_attention import LightningAttentionConfig, layer_decay_rates
from ..weights.rows import Row
from .family import AttentionLayer, Family
from .llama import read_mistral
from .reading.model_config import ConfigFile
from .rows.attention import Table


def table(config: LightningAttentionConfig) -> Table:
    """Return the rows of a lightning layer: of each head its query, its key and its value in one projection."""
    computed = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    return (
        Row(
            "qkv_proj.weight",
            ("W_query.weight", "W_key.weight", "W_value.weight"),
            "(h c) i -> (h part c) i",
            part="part",
            sizes={"h": config.num_heads},
        ),
        Row("output_gate.weight", ("W_gate.weight",)),
        Row("norm.weight", ("norm.scale",)),
        Row("out_proj.weight", ("out_proj.weight",)),
        *(Row(name, reason="decays, which follow from the config") for name in computed),
    )


def read_lightning(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of lightning attention.

    Its norm adds 1e-6 regardless of ``rms_norm_eps``, as in `transformers`.
    """
    config.refuse("hidden_act", "silu", "swish")
    heads = config.integer("num_attention_heads")
    spec = LightningAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        head_dim=config.integer_or_none("head_dim"),
        decay_rates=layer_decay_rates(heads, layer, config.integer("num_hidden_layers")),
    )
    prefix = f"model.layers.{layer}.self_attn."
    return AttentionLayer("LightningAttention", spec, layer, {"transformers": table(spec)}, prefix)


def read_minimax(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of either kind; without ``layer_types`` every second one has lightning attention."""
    kind = config.layer_type(layer, "linear_attention" if layer % 2 else "full_attention")
    kinds = {"full_attention": read_mistral, "linear_attention": read_lightning}
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    return kinds[kind](config, layer)


FAMILIES = (
    Family(
        ("minimax",),
        read_minimax,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
    ),
)
