"""Mamba-2 (arXiv 2405.21060) and Bamba, whose layers are those of Mamba-2 or attention with partly rotary positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ...printable import printable
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.mamba2 import Mamba2Config
from ...specs.rms_norm import RMSNormConfig
from ..family import AttentionLayer
from ..reading.decoders import WrittenKeys, attention_of, write_llama_decoder, write_sizes
from ..reading.grouped import head_dim_of, read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer


def _limits(config: ConfigFile) -> WrittenKeys:
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


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of a config for the sizes and biases of a layer of Mamba-2.

    Attributes:
        heads: number of heads.
        head_dim: width of a head.
        expand: factor of the model's width that heads and head width make together.
        state: width of the state.
        groups: number of groups.
        conv: taps of the convolution.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        eps: epsilon of the norms.
        width: width of all heads together, which takes precedence over `expand`; "" if the family has no such key.
        min_step: lower bound of a step; "" if ``time_step_limit`` has both bounds.
        activation: activation of the convolution and of the gate.

    Without `expand` the width of all heads is free.
    """

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    expand: str = "mamba_expand"
    state: str = "mamba_d_state"
    groups: str = "mamba_n_groups"
    conv: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    eps: str = "rms_norm_eps"
    width: str = ""
    min_step: str = ""
    activation: str = "hidden_act"


MAMBA2 = Keys("num_heads", "head_dim", "expand", "state_size", "n_groups", "conv_kernel", "use_conv_bias", "use_bias",
              "layer_norm_epsilon")  # fmt: skip


def read_config(config: ConfigFile, keys: Keys) -> Mamba2Config:
    """Return the config of a layer of Mamba-2."""
    config.refuse(keys.activation, "silu", "swish")
    d_in, heads = config.integer("hidden_size"), config.integer(keys.heads)
    width, rule = config.integer_or_none(keys.width) if keys.width else None, keys.width
    if not keys.expand:
        width = heads * config.integer(keys.head_dim)
    elif width is None:
        width, rule = config.integer(keys.expand) * d_in, f"{keys.expand} * hidden_size"
    head_dim = width // heads if config.get(keys.head_dim) == "auto" else config.integer(keys.head_dim)
    if width != heads * head_dim:
        raise ValueError(f"{keys.heads} * {keys.head_dim} ({heads * head_dim}) must be {rule} ({width})")
    return Mamba2Config(
        d_in=d_in,
        num_heads=heads,
        head_dim=head_dim,
        state_size=config.integer(keys.state),
        num_groups=config.integer(keys.groups),
        conv_size=config.integer(keys.conv),
        conv_bias=config.flag(keys.conv_bias),
        bias=config.flag(keys.bias),
        eps=config.positive(keys.eps),
        **({"min_step": config.number(keys.min_step)} if keys.min_step else _limits(config)),
    )


def write_layer(config: DecoderConfig, keys: Keys) -> WrittenKeys:
    """Return the keys that `read_config` reads, of the first layer of Mamba-2.

    Raises:
        ValueError: no layer of the model is one, or the width of its heads does not fit.
    """
    return write_keys(attention_of(config, Mamba2Config), keys)


def write_keys(layer: Mamba2Config, keys: Keys) -> WrittenKeys:
    """Return the keys that `read_config` reads.

    Raises:
        ValueError: the width of the heads does not fit.
    """
    if not keys.width and keys.expand and layer.width % layer.d_in:
        raise ValueError(f"num_heads * head_dim ({layer.width}) must be a multiple of d_in ({layer.d_in}) there")
    written = {
        keys.heads: layer.num_heads,
        keys.head_dim: layer.head_dim,
        **({keys.width: layer.width} if keys.width else {}),
        **({keys.expand: layer.width // layer.d_in} if keys.expand and not keys.width else {}),
        keys.state: layer.state_size,
        keys.groups: layer.num_groups,
        keys.conv: layer.conv_size,
        keys.conv_bias: layer.conv_bias,
        keys.bias: layer.bias,
        keys.eps: layer.eps,
    }
    if keys.min_step:
        if layer.max_step is not None:
            raise ValueError(f"max_step ({layer.max_step}) must be None there")
        return {**written, keys.min_step: layer.min_step}
    if layer.min_step == 0 and layer.max_step is None:
        return written
    most = {"__float__": "Infinity"} if layer.max_step is None else layer.max_step
    return {**written, "time_step_limit": [layer.min_step, most]}


def read_mamba2(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mamba-2."""
    return attention_of_layer(table("hf-mamba2"), config, layer, read_config(config, MAMBA2))


def _mamba2_norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("layer_norm_epsilon"))


def read_mamba2_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Mamba-2, which has no feed-forward layers."""
    return DecoderBlockConfig(attention, None, _mamba2_norm(config))


def read_mamba2_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: its norm, and a head that may be tied."""
    return {"norm": _mamba2_norm(config), "tie": config.flag("tie_word_embeddings")}


def write_mamba2(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Mamba-2."""
    return {**write_sizes(config), **write_layer(config, MAMBA2), "hidden_act": "silu"}


BAMBA = table("hf-bamba")

_PARTIAL = 0.5
"""Rotated part of a head in Bamba, whatever ``partial_rotary_factor`` is."""


def read_bamba(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Bamba: attention where ``attn_layer_indices`` names it, else Mamba-2."""
    if layer not in (config.get("attn_layer_indices") or ()):
        return attention_of_layer(BAMBA, config, layer, read_config(config, Keys()))
    bias = config.flag("attention_bias")
    keys = {**config.given, "partial_rotary_factor": _PARTIAL}
    half = config.with_given(keys)
    position = read_rotary(half, head_dim_of(config), partial=True)
    spec = GroupedQueryAttentionConfig(**read_sizes(config), qkv_bias=bias, out_bias=bias, position=position)
    return attention_of_layer(BAMBA, config, layer, spec)


def write_bamba(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Bamba."""
    kinds = [isinstance(block.attention, GroupedQueryAttentionConfig) for block in config.blocks]
    written = {
        **write_llama_decoder(config, bias="mlp_bias"),
        **write_layer(config, Keys()),
        "attn_layer_indices": [number for number, is_full in enumerate(kinds) if is_full],
    }
    if not any(kinds):
        return written
    attention = attention_of(config, GroupedQueryAttentionConfig)
    rotary = write_rotary(attention.position, attention.head_dim)
    if rotary.get("partial_rotary_factor", _PARTIAL) != _PARTIAL:
        raise ValueError(f"position ({attention.position}) must turn half of the {attention.head_dim} channels there")
    return {
        **written,
        **write_heads(attention),
        **rotary,
        "attention_bias": attention.qkv_bias,
    }
