"""Mamba-2 (arXiv 2405.21060) and Bamba, whose layers are those of Mamba-2 or attention with partly rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..printable import printable
from ..specs.grouped_query_attention import GroupedQueryAttentionConfig
from ..specs.mamba2 import Mamba2Config
from ..weights.rows import Row
from .family import AttentionLayer, Family
from .grouped import attention_layer, head_dim_of, read_sizes
from .reading.model_config import ConfigFile
from .reading.rotary import read_rotary
from .rows.attention import SPLIT, Table


def table(config: Mamba2Config) -> Table:
    """Return the rows of a layer: gate, value, key, query and steps of all heads in one projection."""
    names = ("W_gate", "W_value", "W_key", "W_query", "W_step")
    widths = (config.width, config.width, config.key_width, config.key_width, config.num_heads)
    projections = tuple(
        Row(f"in_proj.{leaf}", tuple(f"{name}.{leaf}" for name in names), pattern, along="o", split=widths)
        for leaf, pattern in (("weight", "o i -> o i"), *((("bias", "o -> o"),) if config.bias else ()))
    )
    return (
        *projections,
        Row("conv1d.weight", ("conv1d.weight",)),
        *((Row("conv1d.bias", ("conv1d.bias",)),) if config.conv_bias else ()),
        *(Row(name, (name,)) for name in ("dt_bias", "A_log", "D")),
        Row("norm.weight", ("norm.scale",)),
        Row("out_proj.weight", ("out_proj.weight",)),
        *((Row("out_proj.bias", ("out_proj.bias",)),) if config.bias else ()),
    )


def _limits(config: ConfigFile) -> dict[str, Any]:
    """Return the least and the most that a step may be.

    Raises:
        ValueError: ``time_step_limit`` is not two numbers.
    """
    limits = config.get("time_step_limit")
    if limits is None:
        return {}
    least, most = map(_limit, limits) if isinstance(limits, (list, tuple)) and len(limits) == 2 else (None, None)
    if least is None or most is None:
        raise ValueError(f"time_step_limit ({printable(repr(limits))}) must be two numbers")
    return {"min_step": least, "max_step": None if most == math.inf else most}


def _limit(value: object) -> float | None:
    """Return a number, including transformers 5's form of infinities, which JSON lacks; None for anything else."""
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return math.inf
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _layer(config: ConfigFile, layer: int, prefix: str, eps: str, names: dict[str, str]) -> AttentionLayer:
    """Return a layer of Mamba-2; `names` are the config's keys for sizes and biases."""
    config.refuse("hidden_act", "silu", "swish")
    d_in, heads, head_dim = (config.integer(key) for key in ("hidden_size", names["heads"], names["head_dim"]))
    if config.integer(names["expand"]) * d_in != heads * head_dim:
        raise ValueError(
            f"{names['heads']} * {names['head_dim']} ({heads * head_dim}) must be {names['expand']} * hidden_size "
            f"({config.integer(names['expand']) * d_in})"
        )
    spec = Mamba2Config(
        d_in=d_in,
        num_heads=heads,
        head_dim=head_dim,
        state_size=config.integer(names["state"]),
        num_groups=config.integer(names["groups"]),
        conv_size=config.integer(names["conv"]),
        conv_bias=config.flag(names["conv_bias"]),
        bias=config.flag(names["bias"]),
        eps=config.positive(eps),
        **_limits(config),
    )
    return AttentionLayer("Mamba2", spec, layer, {"transformers": table(spec)}, prefix)


_MAMBA2 = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "expand": "expand",
    "state": "state_size",
    "groups": "n_groups",
    "conv": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}

_BAMBA = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "expand": "mamba_expand",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
    "conv": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}


def read_mamba2(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mamba-2."""
    return _layer(config, layer, f"backbone.layers.{layer}.mixer.", "layer_norm_epsilon", _MAMBA2)


def read_bamba(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Bamba: attention where ``attn_layer_indices`` names it, else Mamba-2."""
    if layer not in (config.get("attn_layer_indices") or ()):
        return _layer(config, layer, f"model.layers.{layer}.mamba.", "rms_norm_eps", _BAMBA)
    bias = config.flag("attention_bias")
    position = read_rotary(config, head_dim_of(config), partial=True)
    spec = GroupedQueryAttentionConfig(**read_sizes(config), qkv_bias=bias, out_bias=bias, position=position)
    return attention_layer(layer, spec, {"transformers": SPLIT})


FAMILIES = (
    Family(
        ("mamba2",),
        read_mamba2,
        {
            "hidden_act": "silu",
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "expand": 2,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    Family(
        ("bamba",),
        read_bamba,
        {
            "hidden_act": "silu",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
)
