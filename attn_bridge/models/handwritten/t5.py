"""T5, mT5 and UMT5: relative bias, scores without a scale; whole models, and single attention layers.

The config of a layer is that of one stack, as `transformers` makes it: with ``is_decoder`` the decoder's, else the
encoder's. In T5 and mT5, all layers use the table of biases that the first layer has; each layer of UMT5 has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from ...masks import causal, full
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.cross_attention import CrossAttentionConfig
from ...specs.encoder_decoder_model import EncoderDecoderBlockConfig, EncoderDecoderConfig, StackConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.position import RelativeBias
from ...specs.rms_norm import RMSNormConfig
from ...weights.rows import Row
from ..family import AttentionLayer
from ..reading.decoders import ACTIVATIONS, MAX_LAYERS, NAMES, activation_of
from ..reading.model_config import ConfigFile
from ..rows.attention import Table

PROJECTIONS: Table = tuple(
    Row(f"{theirs}.weight", (f"{ours}.weight",))
    for theirs, ours in (("q", "W_query"), ("k", "W_key"), ("v", "W_value"), ("o", "out_proj"))
)

TABLE: Table = (*PROJECTIONS, Row("relative_attention_bias.weight", ("relative_bias",)))


def _attention(config: ConfigFile, *, is_decoder: bool) -> GroupedQueryAttentionConfig:
    """Return the attention of a stack's first layer to its own sequence."""
    return GroupedQueryAttentionConfig(
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


def read_umt5(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return the attention of a layer to its own sequence."""
    is_decoder = config.flag("is_decoder")
    side = "decoder" if is_decoder else "encoder"
    prefix = f"{side}.block.{layer}.layer.0.SelfAttention."
    spec = _attention(config, is_decoder=is_decoder)
    return AttentionLayer("GroupedQueryAttention", spec, layer, {"transformers": TABLE}, prefix)


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


def _feed_forward(config: ConfigFile, rate: float) -> FeedForwardConfig:
    """Return the feed-forward layers; keys that `transformers` derives go before the one that it derives them from."""
    kind, *more = str(config.get("feed_forward_proj")).split("-")
    if len(more) > 1 or (more and kind != "gated"):
        config.refuse("feed_forward_proj", "relu", "gated-gelu")
    derived = {
        "dense_act_fn": "gelu_new" if more == ["gelu"] else (more or [kind])[0],
        "is_gated_act": kind == "gated",
    }
    read = ConfigFile({**derived, **config.given}, config.model_type, config.defaults)
    if derived["dense_act_fn"] not in ACTIVATIONS and "dense_act_fn" not in config.given:
        activation_of(config, "feed_forward_proj")
    gated = read.flag("is_gated_act")
    width, hidden = config.integer("d_model"), config.integer("d_ff")
    activation = activation_of(read, "dense_act_fn")
    return FeedForwardConfig(width, hidden, activation, gated=gated, dropout=0.0 if gated else rate)


def _stack(config: ConfigFile, side: str) -> StackConfig:
    """Return one side; the dropout behind its last norm, and in gated layers, is that of training alone."""
    key = "num_decoder_layers" if side == "decoder" and config.get("num_decoder_layers") is not None else "num_layers"
    layers, rate = config.integer(key), config.number_or_none("dropout_rate") or 0.0
    if layers > MAX_LAYERS:
        raise ValueError(f"{key} ({layers}) of {config.model_type} must be at most {MAX_LAYERS}")
    first = _attention(config, is_decoder=side == "decoder")
    norm = RMSNormConfig(first.d_in, config.number("layer_norm_epsilon"))
    cross = CrossAttentionConfig(first.d_in, first.num_heads, head_dim=first.head_dim, scale=1.0, dropout=first.dropout)
    feed_forward = _feed_forward(config, rate)
    block = EncoderDecoderBlockConfig(first, feed_forward, norm, cross if side == "decoder" else None, dropout=rate)
    later = block
    if config.model_type != "umt5" and isinstance(first.position, RelativeBias):
        later = block.replace(attention=first.replace(position=dataclasses.replace(first.position, shared=True)))
    return StackConfig(first.d_in, (block, *(later,) * (layers - 1)), None, norm=norm, dropout=rate)


def read_pair(config: ConfigFile, names: Collection[str]) -> EncoderDecoderConfig:
    """Return a whole model, as `transformers` 5 runs it.

    The head is tied unless the file has one; ``tie_word_embeddings`` may be true even then. The logits of UMT5 are
    always scaled, those of mT5 never, and those of T5 by ``scale_decoder_outputs``, or else by that key.
    """
    for key, value in {"is_encoder_decoder": True, "is_decoder": False}.items():
        config.refuse(key, value, None)
    width, tie = config.integer("d_model"), config.get("tie_word_embeddings") is not False
    scaled = {"umt5": True, "mt5": False}.get(config.model_type, tie)
    if config.model_type == "t5" and config.get("scale_decoder_outputs") is not None:
        scaled = config.flag("scale_decoder_outputs")
    tie = tie and "lm_head.weight" not in names
    encoder, decoder = (_stack(config, side) for side in ("encoder", "decoder"))
    scale = width**-0.5 if scaled else 1.0
    return EncoderDecoderConfig(config.integer("vocab_size"), encoder, decoder, tie, logit_scale=scale)


def write_pair(config: EncoderDecoderConfig, model_type: str) -> dict[str, Any]:
    """Return the keys that `read_pair` reads."""
    block = config.decoder.blocks[0]
    attention, layers = block.attention, block.feed_forward
    position = attention.position
    if not isinstance(position, RelativeBias):
        raise ValueError(f"position of decoder.blocks[0] ({position}) must be a RelativeBias")
    names = NAMES | {"gelu_tanh": "gelu", "gelu": "gelu_python"} if layers.gated else NAMES
    return {
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.decoder.emb_dim,
        "d_kv": attention.head_dim,
        "d_ff": layers.hidden_dim,
        "num_layers": len(config.encoder.blocks),
        "num_decoder_layers": len(config.decoder.blocks),
        "num_heads": attention.num_heads,
        "relative_attention_num_buckets": position.num_buckets,
        "relative_attention_max_distance": position.max_distance,
        "dropout_rate": config.decoder.dropout,
        "layer_norm_epsilon": getattr(block.norm, "eps", None),
        "feed_forward_proj": "gated-" * layers.gated + names[layers.activation],
        "tie_word_embeddings": config.tie,
        "decoder_start_token_id": None,
        **({"scale_decoder_outputs": config.logit_scale != 1.0} if model_type == "t5" else {}),
    }
