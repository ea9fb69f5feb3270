"""BART and Whisper: the attention of their decoders to what the encoder made, ``encoder_attn``."""

from __future__ import annotations

from ..layouts.attention import ENCODER_DECODER
from ..specs.cross_attention import CrossAttentionConfig
from .base import AttentionLayer, Family
from .model_config import ModelConfig


def read_cross_attention(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return the cross attention of a layer of the decoder; all has biases, but Whisper's keys."""
    spec = CrossAttentionConfig(
        d_in=config.integer("d_model"),
        num_heads=config.integer("decoder_attention_heads"),
        qkv_bias=True,
        key_bias=config.model_type != "whisper",
        out_bias=True,
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )
    prefix = f"model.decoder.layers.{layer}.encoder_attn."
    return AttentionLayer("CrossAttention", spec, layer, {"transformers": ENCODER_DECODER}, prefix)


FAMILIES = (
    Family(
        ("bart",),
        read_cross_attention,
        {"d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 12},
        depth="decoder_layers",
    ),
    Family(
        ("whisper",),
        read_cross_attention,
        {"d_model": 384, "decoder_attention_heads": 6, "decoder_layers": 4},
        depth="decoder_layers",
    ),
)
