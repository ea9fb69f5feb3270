"""Layers of type ``linear_attention``: the gated delta net of Qwen3-Next, in its two layouts."""

from __future__ import annotations

from collections.abc import Callable

from ..layouts import Row
from ..specs.gated_delta_net import GatedDeltaNetConfig
from .base import AttentionLayer, Table
from .model_config import ModelConfig

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""What `transformers` takes for keys that a config leaves out."""

_ALIKE: Table = (
    Row("conv1d.weight", ("conv1d.weight",)),
    Row("dt_bias", ("dt_bias",)),
    Row("A_log", ("A_log",)),
    Row("norm.weight", ("norm.scale",)),
    Row("out_proj.weight", ("out_proj.weight",)),
)


def grouped_table(config: GatedDeltaNetConfig) -> Table:
    """Return the table of Qwen3-Next: per key head its query, its key, then value and gate of its value heads.

    Beta and alpha are in the same groups.
    """
    head_dim, values = config.key_width // config.num_heads, config.value_width // config.num_heads
    return (
        Row(
            "in_proj_qkvz.weight",
            ("W_query.weight", "W_key.weight", "W_value.weight", "W_gate.weight"),
            "(h c) i -> (h c) i",
            along="c",
            split=(head_dim, head_dim, values, values),
            sizes={"h": config.num_heads},
        ),
        Row(
            "in_proj_ba.weight",
            ("W_beta.weight", "W_alpha.weight"),
            "(h g) i -> (h part g) i",
            part="part",
            sizes={"h": config.num_heads},
        ),
        *_ALIKE,
    )


def split_table(config: GatedDeltaNetConfig) -> Table:
    """Return the table of Qwen3.5: query, key and value of all heads in one tensor, the others each in its own."""
    return (
        Row(
            "in_proj_qkv.weight",
            ("W_query.weight", "W_key.weight", "W_value.weight"),
            "o i -> o i",
            along="o",
            split=(config.key_width, config.key_width, config.value_width),
        ),
        Row("in_proj_z.weight", ("W_gate.weight",)),
        Row("in_proj_b.weight", ("W_beta.weight",)),
        Row("in_proj_a.weight", ("W_alpha.weight",)),
        *_ALIKE,
    )


def reader(table: Callable[[GatedDeltaNetConfig], Table]) -> Callable[[ModelConfig, int], AttentionLayer]:
    """Return what reads a layer whose tensors are in that table."""

    def read(config: ModelConfig, layer: int) -> AttentionLayer:
        """Return a layer of gated delta net."""
        config.refuse("hidden_act", "silu", "swish")  # its convolution has it, too
        spec = GatedDeltaNetConfig(
            d_in=config.integer("hidden_size"),
            num_heads=config.integer("linear_num_key_heads"),
            num_value_heads=config.integer("linear_num_value_heads"),
            head_dim=config.integer("linear_key_head_dim"),
            value_head_dim=config.integer("linear_value_head_dim"),
            conv_size=config.integer("linear_conv_kernel_dim"),
            eps=config.number("rms_norm_eps"),
        )
        tables = {"transformers": table(spec)}
        return AttentionLayer("GatedDeltaNet", spec, layer, tables, f"model.layers.{layer}.linear_attn.")

    return read
