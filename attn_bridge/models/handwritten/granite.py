"""Granite: Llama with factors for embeddings, scores, residual additions, and logits."""

from __future__ import annotations

import dataclasses

from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ..family import AttentionLayer, Family
from ..reading.decoders import (
    WrittenKeys,
    attention_of,
    inverse,
    read_llama_block,
    read_llama_model,
    write_llama_decoder,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary
from ..rows.attention import SPLIT
from .grouped import attention_layer, head_dim_of, read_sizes
from .llama import write_llama_attention


def read_granite(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Granite."""
    bias = config.flag("attention_bias")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config)),
        scale=config.positive("attention_multiplier"),
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def _block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    block = read_llama_block(config, layer, attention)
    return dataclasses.replace(block, residual_scale=config.positive("residual_multiplier"))


def granite_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model as Granite has it: that of Llama, and factors of embeddings and logits."""
    return {
        **read_llama_model(config),
        "embedding_scale": config.positive("embedding_multiplier"),
        "logit_scale": 1.0 / config.positive("logits_scaling"),
    }


def write_granite(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Granite."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    return {
        **write_llama_attention(attention),
        **write_llama_decoder(config, bias="mlp_bias"),
        **write_granite_model(config),
        "attention_multiplier": attention.scale,
    }


def write_granite_model(config: DecoderConfig) -> WrittenKeys:
    """Return the keys of the factors that `granite_model` reads, and of the one of what blocks add."""
    return {
        "residual_multiplier": config.blocks[0].residual_scale,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": inverse(lambda value: 1.0 / value, config.logit_scale, 1.0 / config.logit_scale),
    }


FAMILIES = (
    Family(
        ("granite",),
        read_granite,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        block=_block,
        model=granite_model,
        write=write_granite,
        architecture="GraniteForCausalLM",
    ),
)
