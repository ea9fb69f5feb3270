"""Sizes of any config.json, whatever its family: whole numbers that a model can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...printable import printable
from ..layout import MAX_SIZE
from .decoders import MAX_LAYERS
from .model_config import ModelConfig

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_head", "n_positions", "dim", "n_heads", "n_kv_heads"),
    *("d_model", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
)
"""Keys of sizes that may be null, where `transformers` has a default."""


def check_sizes(config: Mapping[str, Any], least: int = 1) -> None:
    """Refuse a config.json with a size that is none.

    Lists pass: families that are not ours have them for sizes that differ from layer to layer. So does the -1 that
    Meta's params.json has for its vocabulary.

    Args:
        config: the file's.
        least: of a size; families without a feed-forward layer have 0.

    Raises:
        TypeError: a size is no whole number.
        ValueError: it is below `least`, or larger than that of any model.
    """
    kind = config.get("model_type")
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        read = ModelConfig(part, printable(part.get("model_type") or kind or "this config", 60), {})
        for key in (*SIZES, *LAYERS):
            if part.get(key) is None or isinstance(part[key], list) or (kind is None and key == "vocab_size"):
                continue
            size, most = read.integer(key, least), MAX_LAYERS if key in LAYERS else MAX_SIZE
            if size > most:
                raise ValueError(f"{key} ({size}) of {read.model_type} must be at most {most}")
