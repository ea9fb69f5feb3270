"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in every layer, with factors throughout."""

from __future__ import annotations

from collections.abc import Sequence

from ...printable import printable
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.mamba2 import GatedNormOrder, Mamba2Config
from ..derived import mixers
from ..family import AttentionLayer
from ..reading.decoders import (
    WrittenKeys,
    feed_forward_of,
    head_dim_of,
    inverse,
    read_feed_forward,
    read_llama_model,
    read_rms_norm,
    read_sizes,
    write_heads,
    write_llama_decoder,
)
from ..reading.model_config import ConfigFile, as_number
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

_KEYS = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "width": "mamba_d_ssm",
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "num_groups": "mamba_n_groups",
    "conv_size": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
    "eps": "rms_norm_eps",
    "limits": "time_step_limit",
}
"""Field of Mamba-2 -> the key that has it."""


def read_attention(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return the attention of a layer of Falcon-H1.

    The factors of its input and of its keys become one of the scores; that of the input also scales the values, which
    `read_block` counts with the output.
    """
    bias = config.flag("attention_bias")
    if bias:  # which the factor of the input does not scale
        config.refuse("attention_in_multiplier", 1.0)
    factor = config.positive("attention_in_multiplier")
    head_dim = head_dim_of(config)
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim),
        scale=_scale(factor * factor * config.positive("key_multiplier"), head_dim),
    )
    return attention_of_layer(table("hf-falcon-h1"), config, layer, spec)


def _scale(factor: float, head_dim: int) -> float:
    """Return the factor of the scores where query and key together have this one."""
    return float(factor * head_dim**-0.5)


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Falcon-H1."""
    bias = config.flag("mamba_proj_bias")
    if config.flag("projectors_bias") != bias:
        raise ValueError(
            f"projectors_bias ({not bias}) of {config.model_type} must be mamba_proj_bias ({bias}): "
            "the projections of Mamba-2 have biases, or none has"
        )
    factor = config.positive("ssm_in_multiplier")
    if bias:  # which the factor of the input does not scale
        config.refuse("ssm_in_multiplier", 1.0)
    order: GatedNormOrder = "norm_first" if config.flag("mamba_norm_before_gate") else "gate_first"
    config.refuse("hidden_act", "silu", "swish")
    constants = {
        "norm_order": order if config.flag("mamba_rms_norm") else "none",
        "projection_scales": tuple(factor * number for number in _factors(config, "ssm_multipliers", 5)),
    }
    recurrent = mixers.read(config, layer, "mamba2", _KEYS, constants)
    out = config.positive("attention_in_multiplier") * config.positive("attention_out_multiplier")
    return DecoderBlockConfig(
        attention,
        read_feed_forward(config, bias="mlp_bias").replace(scales=_factors(config, "mlp_multipliers", 2)),
        read_rms_norm(config),
        recurrent=recurrent,
        mixer_scales=(out, config.positive("ssm_out_multiplier")),
    )


def _factors(config: ConfigFile, key: str, count: int) -> tuple[float, ...]:
    """Return a list of factors; null is that of ones.

    Raises:
        ValueError: the value is not a list of that many numbers.
    """
    values = config.get(key)
    if values is None:
        return (1.0,) * count
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        raise ValueError(f"{key} ({printable(repr(values))}) of {config.model_type} must be {count} numbers")
    return tuple(as_number(f"{key}[{number}] of {config.model_type}", value) for number, value in enumerate(values))


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: that of Llama, and factors of embeddings and logits."""
    return {
        **read_llama_model(config),
        "embedding_scale": config.positive("embedding_multiplier"),
        "logit_scale": config.positive("lm_head_multiplier"),
    }


def write_falcon_h1(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Falcon-H1.

    Raises:
        ValueError: the first block has other attention, or no Mamba-2 next to it.
    """
    block = config.blocks[0]
    attention, recurrent = block.attention, block.recurrent
    if not isinstance(attention, GroupedQueryAttentionConfig) or not isinstance(recurrent, Mamba2Config):
        raise ValueError("blocks must have grouped-query attention and Mamba-2 next to each other there")
    width, scale = attention.head_dim, attention.scale
    return {
        **write_llama_decoder(config, bias="mlp_bias"),
        **write_heads(attention),
        **write_rotary(attention.position),
        **mixers.write_layer(recurrent, _KEYS),
        "attention_bias": attention.qkv_bias,
        "projectors_bias": recurrent.bias,
        "mamba_rms_norm": recurrent.norm_order != "none",
        "mamba_norm_before_gate": recurrent.norm_order == "norm_first",
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logit_scale,
        "key_multiplier": inverse(lambda factor: _scale(factor, width), scale, scale * width**0.5),
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": block.mixer_scales[0],
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": block.mixer_scales[1],
        "ssm_multipliers": list(recurrent.projection_scales),
        "mlp_multipliers": list(feed_forward_of(config, FeedForwardConfig).scales),
    }
