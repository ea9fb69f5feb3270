"""Whole decoders from a ``config.json``: blocks, embeddings and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from ...masks import Mask, causal, sliding_window
from ...printable import printable
from ...specs.blocks.feed_forward import HiddenActivation
from ...specs.decoder_model import DecoderConfig
from ...specs.differential_attention import DifferentialAttentionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from .model_config import MAX_LAYERS, MAX_SIZE, ConfigFile

WrittenKeys: TypeAlias = dict[str, Any]
"""Keys of a config.json, as a family writes them."""

Attention: TypeAlias = GroupedQueryAttentionConfig | MultiHeadLatentAttentionConfig | DifferentialAttentionConfig
"""Attention of a decoder that is not recurrent."""

Part = TypeVar("Part")

ACTIVATIONS: dict[str, HiddenActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Their name of an activation -> ours; those by tanh differ in how they are rounded alone."""

NAMES: dict[HiddenActivation, str] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Our name of an activation -> the usual one of theirs."""


def activation_of(config: ConfigFile, key: str = "hidden_act") -> HiddenActivation:
    """Return the activation that a key of a config names.

    Raises:
        ValueError: the activation is unknown.
    """
    value = config.get(key)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise ValueError(
            f"{key} ({printable(repr(value))}) of {config.model_type} must be one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[value]


def inverse(formula: Callable[[float], float], value: float, near: float) -> float:
    """Return the shortest number near a guess that a formula maps to a value, exact to the last bit if possible."""
    # 17 significant digits tell all numbers of float64 apart.
    rounded = [round(near, digits) for digits in range(17)]
    candidates = [one for one in (*rounded, *(math.nextafter(near, to) for to in (0.0, math.inf))) if one > 0]
    return next((one for one in candidates if formula(one) == value), near)


def write_sizes(config: DecoderConfig) -> WrittenKeys:
    """Return the keys that are alike in every family: vocabulary, width, depth, and whether the head is tied."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.emb_dim,
        "num_hidden_layers": len(config.blocks),
        "tie_word_embeddings": config.tie,
    }


def attention_of(config: DecoderConfig, kind: type[Part]) -> Part:
    """Return the first attention of a kind; `ValueError` where no block has one."""
    instances = [block.attention for block in config.blocks if isinstance(block.attention, kind)]
    if not instances:
        raise ValueError(f"attention of no block is a {kind.__name__}")
    return instances[0]


KINDS = ("full_attention", "sliding_attention")
"""Names of a layer's kind: without and with the window."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_head", "n_positions", "dim", "n_heads", "n_kv_heads"),
    *("d_model", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
)
"""Keys of sizes that may be null, where `transformers` has a default."""


def check_sizes(config: Mapping[str, object], least: int = 1) -> None:
    """Refuse a config.json with an invalid size.

    Lists are accepted: families that are not ours use them for sizes that differ from layer to layer. So is -1 as the
    vocabulary of Meta's params.json.

    Args:
        config: the file's.
        least: minimum of a size; families without a feed-forward layer have 0.

    Raises:
        TypeError: a size is not a whole number.
        ValueError: it is below `least`, or larger than that of any model.
    """
    kind = config.get("model_type")
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        read = ConfigFile(part, printable(part.get("model_type") or kind or "this config", 60), {})
        for key in (*SIZES, *LAYERS):
            if part.get(key) is None or isinstance(part[key], list) or (kind is None and key == "vocab_size"):
                continue
            read.integer(key, least, MAX_LAYERS if key in LAYERS else MAX_SIZE)


def write_heads(attention: Attention) -> WrittenKeys:
    """Return the keys with the same names in every family: heads, their width, dropout."""
    if isinstance(attention, MultiHeadLatentAttentionConfig):
        own: WrittenKeys = {"num_key_value_heads": attention.num_heads}
    else:
        own = {"num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim}
    dropout = getattr(attention, "dropout", 0.0)
    return {"num_attention_heads": attention.num_heads, **own, "attention_dropout": dropout}


def is_rotated(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer has rotary positions: 1 in ``no_rope_layers``, in spite of that key's name."""
    layers = config.get("no_rope_layers")
    if layers is None or (layers == [] and config.model_type == "llama4_text"):  # as its published files have it
        return (layer + 1) % config.integer("no_rope_layer_interval") != 0
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not all(one in (0, 1) for one in layers):
        raise TypeError(f"no_rope_layers of {config.model_type} must be a list of 0 and 1, got {layers!r:.60}")
    if layer >= len(layers):
        raise ValueError(f"no_rope_layers of {config.model_type} has {len(layers)} entries, none for layer {layer}")
    return bool(layers[layer])


def mask_of(config: ConfigFile, layer: int, kind: str) -> Mask:
    """Return the mask of a layer of that kind.

    Raises:
        ValueError: an unknown kind, or a layer with a window in a config without.
    """
    if kind == KINDS[False]:
        return causal()
    if kind != KINDS[True]:
        raise ValueError(
            f"layer {layer} of {config.model_type} is of type {kind}, which must be full_attention or sliding_attention"
        )
    if config.get("sliding_window") is None:
        raise ValueError(f"layer {layer} of {config.model_type} is sliding_attention, but sliding_window is null")
    return sliding_window(config.integer("sliding_window"))


def window_of(mask: Mask) -> int | None:
    """Return the window of a mask; None if all earlier tokens are visible.

    Raises:
        ValueError: a mask of another kind.
    """
    size = mask.reach
    if mask != (causal() if size is None else sliding_window(size)):
        raise ValueError(f"mask ({mask}) is neither causal nor a sliding window")
    return size


def write_windows(config: DecoderConfig) -> WrittenKeys:
    """Return the keys of a model whose layers each have the window or not.

    If no layer has it, the width of the window is left out, since `transformers` would apply it anyway in some
    families.
    """
    sizes = [window_of(getattr(block.attention, "mask", causal())) for block in config.blocks]
    keys: dict[str, object] = {"layer_types": [KINDS[size is not None] for size in sizes]}
    first = next((size for size in sizes if size is not None), None)
    return keys if first is None else {**keys, "sliding_window": first}


def rotary_by_kind(config: DecoderConfig, kinds: Sequence[str]) -> dict[str, object]:
    """Return kind of layers -> the rotary position of its first one."""
    positions: dict[str, object] = {}
    for block, kind in zip(config.blocks, kinds, strict=True):
        positions.setdefault(kind, getattr(block.attention, "position", None))
    return positions
