"""Encoders with decoders drawn at random: what a family reads, with a few parts changed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from attn_bridge import masks
from attn_bridge.models import families
from attn_bridge.specs.encoder_decoder_model import EncoderDecoderConfig, StackConfig
from attn_bridge.specs.layer_norm import LayerNormConfig

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "d_model": 12,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 10,
    "decoder_ffn_dim": 14,
    "max_position_embeddings": 17,
    "max_source_positions": 9,
    "max_target_positions": 19,
    "num_mel_bins": 5,
    "d_kv": 4,
    "d_ff": 14,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
}


def read(model_type: str, *, names: tuple[str, ...] = (), **keys: Any) -> EncoderDecoderConfig:
    """Return a small model of a family, with keys of its config.json changed; `names` are those of its tensors."""
    return families.find_encoder_decoder({"model_type": model_type, **SIZES, **keys}, names)


def changed(config: EncoderDecoderConfig, side: str, part: str = "", **changes: Any) -> EncoderDecoderConfig:
    """Return a model with other values in one stack: its own, those of its blocks (``blocks``), or of a part of them.

    Args:
        config: the model's.
        side: ``encoder`` or ``decoder``.
        part: ``blocks``, or the name of a part of a block; "" is the stack itself.
        changes: name -> value.
    """
    stack: StackConfig = getattr(config, side)
    if part:
        blocks = []
        for block in stack.blocks:
            inner = changes if part == "blocks" else {part: dataclasses.replace(getattr(block, part), **changes)}
            blocks.append(dataclasses.replace(block, **inner))
        changes = {"blocks": tuple(blocks)}
    new: dict[str, Any] = {side: dataclasses.replace(stack, **changes)}
    return dataclasses.replace(config, **new)


def draw(model_type: str, seed: int) -> EncoderDecoderConfig:
    """Return a model of a family with up to two changes, which may make it one of no family."""
    rng = random.Random(f"{model_type} {seed}")
    keys = {
        "activation_function": rng.choice(["gelu", "gelu_new", "relu", "silu"]),
        "tie_word_embeddings": rng.choice([True, False]),
        "scale_embedding": rng.choice([True, False]),
        **{key: rng.choice([0.0, 0.1, 0.3]) for key in ("dropout", "attention_dropout", "activation_dropout")},
        **{key: rng.choice([1, 2, 3]) for key in ("encoder_layers", "decoder_layers")},
        **{key: rng.choice([1, 2, 6]) for key in ("encoder_attention_heads", "decoder_attention_heads")},
        **{key: rng.choice([1, 2, 3]) for key in ("num_layers", "num_decoder_layers", "num_heads")},
        "feed_forward_proj": rng.choice(["relu", "silu", "gated-gelu", "gated-gelu_python", "gated-silu"]),
        "dropout_rate": rng.choice([0.0, 0.1, 0.3]),
    }
    names = ("final_logits_bias",) if model_type == "bart" and rng.random() < 0.5 else ()
    config = read(model_type, names=names, **keys)
    for _ in range(seed % 3):
        try:
            config = _changed(config, rng)
        except ValueError:  # a change that does not fit the others
            continue
    return config


def _changed(config: EncoderDecoderConfig, rng: random.Random) -> EncoderDecoderConfig:
    side, width = rng.choice(["encoder", "decoder"]), config.decoder.emb_dim
    choices: list[tuple[str, dict[str, Any]]] = [
        ("", {"num_positions": 21}),
        ("", {"embedding_scale": 2.5}),
        ("", {"position_offset": 1}),
        ("", {"norm": None}),
        ("", {"norm": LayerNormConfig(width)}),
        ("", {"embedding_norm": LayerNormConfig(width, 1e-3)}),
        ("", {"dropout": 0.2}),
        ("blocks", {"norms": rng.choice(["pre", "post"])}),
        ("blocks", {"norm": LayerNormConfig(width, 1e-6)}),
        ("attention", {"out_bias": False}),
        ("attention", {"key_bias": rng.choice([True, False])}),
        ("attention", {"num_kv_heads": 1}),
        ("attention", {"mask": rng.choice([masks.full(), masks.causal(), masks.sliding_window(3)])}),
        ("attention", {"scale": 0.4}),
        ("feed_forward", {"hidden_dim": 8}),
        ("feed_forward", {"activation": "relu"}),
        ("feed_forward", {"bias": False}),
    ]
    part, changes = rng.choice(choices)
    return changed(config, side, part, **changes)
