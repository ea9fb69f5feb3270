"""BART and Whisper: an encoder, and a decoder whose layers attend to themselves and to the encoder's output."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from ...masks import causal, full
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.cross_attention import CrossAttentionConfig
from ...specs.encoder_decoder_model import (
    ConvolutionsConfig,
    EncoderDecoderBlockConfig,
    EncoderDecoderConfig,
    Place,
    StackConfig,
)
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.layer_norm import LayerNormConfig
from ..family import AttentionLayer
from ..reading.decoders import MAX_LAYERS, NAMES, activation_of
from ..reading.model_config import ConfigFile
from ..rows.attention import ENCODER_DECODER

SIDES = ("encoder", "decoder")


def _cross_attention(config: ConfigFile) -> CrossAttentionConfig:
    """Return the config of cross attention; all projections have biases, except Whisper's keys."""
    return CrossAttentionConfig(
        d_in=config.integer("d_model"),
        num_heads=config.integer("decoder_attention_heads"),
        qkv_bias=True,
        key_bias=config.model_type != "whisper",
        out_bias=True,
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )


def read_cross_attention(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return the cross attention of a layer of the decoder."""
    prefix = f"model.decoder.layers.{layer}.encoder_attn."
    return AttentionLayer("CrossAttention", _cross_attention(config), layer, {"transformers": ENCODER_DECODER}, prefix)


def _blocks(config: ConfigFile, side: str, norms: Place) -> tuple[EncoderDecoderBlockConfig, ...]:
    """Return the blocks of one side."""
    width, layers = config.integer("d_model"), config.integer(f"{side}_layers")
    if layers > MAX_LAYERS:
        raise ValueError(f"{side}_layers ({layers}) of {config.model_type} must be at most {MAX_LAYERS}")
    attention = GroupedQueryAttentionConfig(
        width,
        config.integer(f"{side}_attention_heads"),
        qkv_bias=True,
        out_bias=True,
        mask=causal() if side == "decoder" else full(),
        dropout=config.number_or_none("attention_dropout") or 0.0,
        key_bias=config.model_type != "whisper",
    )
    hidden, activation = config.integer(f"{side}_ffn_dim"), activation_of(config, "activation_function")
    rate, within = (config.number_or_none(key) or 0.0 for key in ("dropout", "activation_dropout"))
    feed_forward = FeedForwardConfig(width, hidden, activation, gated=False, bias=True, dropout=within)
    cross = _cross_attention(config) if side == "decoder" else None
    block = EncoderDecoderBlockConfig(attention, feed_forward, LayerNormConfig(width), cross, norms, rate)
    return (block,) * layers


def _refuse(config: ConfigFile, wanted: dict[str, Any]) -> None:
    """Refuse keys with values other than `wanted`, if they are present."""
    for key, value in {"is_encoder_decoder": True, "is_decoder": False, **wanted}.items():
        config.refuse(key, value, None)


def read_bart(config: ConfigFile, names: Collection[str]) -> EncoderDecoderConfig:
    """Return a whole BART; its bias of the logits is omitted if the tensor is missing, since it is zero."""
    before_mbart = {
        "normalize_before": False,
        "normalize_embedding": True,
        "add_final_layer_norm": False,
        "static_position_embeddings": False,
        "extra_pos_embeddings": 2,
    }
    _refuse(config, before_mbart)
    width, vocab_size = config.integer("d_model"), config.integer("vocab_size")
    tie = config.flag("tie_word_embeddings")
    encoder, decoder = (
        StackConfig(
            width,
            _blocks(config, side, "post"),
            config.integer("max_position_embeddings"),
            vocab_size=None if tie else vocab_size,
            position_offset=2,
            embedding_scale=math.sqrt(width) if config.flag("scale_embedding") else 1.0,
            embedding_norm=LayerNormConfig(width),
            dropout=config.number_or_none("dropout") or 0.0,
        )
        for side in SIDES
    )
    has_bias = any(name.endswith("logits_bias") for name in names)  # converted ones have our name
    return EncoderDecoderConfig(vocab_size, encoder, decoder, tie, has_bias)


def read_whisper(config: ConfigFile, names: Collection[str]) -> EncoderDecoderConfig:
    """Return a whole Whisper; `transformers` never scales embeddings, regardless of ``scale_embedding``."""
    _refuse(config, {})
    width, vocab_size = config.integer("d_model"), config.integer("vocab_size")
    norm, rate = LayerNormConfig(width), config.number_or_none("dropout") or 0.0
    encoder = StackConfig(
        width,
        _blocks(config, "encoder", "pre"),
        config.integer("max_source_positions"),
        convolutions=ConvolutionsConfig(config.integer("num_mel_bins"), width),
        learned_positions=False,
        norm=norm,
        dropout=rate,
    )
    decoder = StackConfig(
        width,
        _blocks(config, "decoder", "pre"),
        config.integer("max_target_positions"),
        vocab_size=vocab_size,
        norm=norm,
        dropout=rate,
    )
    return EncoderDecoderConfig(vocab_size, encoder, decoder, config.flag("tie_word_embeddings"))


def _write_sizes(config: EncoderDecoderConfig) -> dict[str, object]:
    """Return the keys that both have; the dropout and the activation of the decoder are those of all parts."""
    stacks = {side: getattr(config, side) for side in SIDES}
    block = config.decoder.blocks[0]
    return {
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.decoder.emb_dim,
        **{f"{side}_layers": len(stack.blocks) for side, stack in stacks.items()},
        **{f"{side}_ffn_dim": stack.blocks[0].feed_forward.hidden_dim for side, stack in stacks.items()},
        **{f"{side}_attention_heads": stack.blocks[0].attention.num_heads for side, stack in stacks.items()},
        "activation_function": NAMES[block.feed_forward.activation],
        "dropout": config.decoder.dropout,
        "attention_dropout": block.attention.dropout,
        "activation_dropout": block.feed_forward.dropout,
        "tie_word_embeddings": config.tie,
    }


def write_bart(config: EncoderDecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of BART, which has as many positions on both sides."""
    return {
        **_write_sizes(config),
        "max_position_embeddings": config.decoder.num_positions,
        "scale_embedding": config.decoder.embedding_scale != 1.0,
        **dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id")),
    }


def write_whisper(config: EncoderDecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Whisper without the start token of decoding, for which `transformers` accepts no null."""
    convolutions = config.encoder.convolutions
    if convolutions is None:
        raise ValueError("encoder.convolutions (None) must be a ConvolutionsConfig")
    return {
        **_write_sizes(config),
        "num_mel_bins": convolutions.channels,
        "max_source_positions": config.encoder.num_positions,
        "max_target_positions": config.decoder.num_positions,
        "scale_embedding": False,
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens")),
    }
