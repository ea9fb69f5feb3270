"""Layers of type ``linear_attention``: the gated delta net of Qwen3-Next, in its two layouts."""

from __future__ import annotations

from collections.abc import Callable

from ..layouts import Row
from ..layouts.attention import DELTA_NET, Table, delta_net_by_head
from ..specs.gated_delta_net import GatedDeltaNetConfig
from .base import AttentionLayer
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


def grouped_table(config: GatedDeltaNetConfig) -> Table:
    """Return the table of Qwen3-Next."""
    return delta_net_by_head(config.num_heads, config.key_width // config.num_heads)


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
        *DELTA_NET,
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
