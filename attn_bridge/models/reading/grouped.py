"""Shared by families with grouped queries: masks, kinds of layers, heads."""

from __future__ import annotations

from collections.abc import Sequence

from ...masks import Mask, causal, sliding_window
from ...specs.decoder_model import DecoderConfig
from ...specs.differential_attention import DifferentialAttentionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from .decoders import WrittenKeys
from .model_config import ConfigFile

KINDS = ("full_attention", "sliding_attention")
"""Names of a layer's kind: without and with the window."""


def write_heads(attention: GroupedQueryAttentionConfig | DifferentialAttentionConfig) -> WrittenKeys:
    """Return the keys with the same names in every family: heads, their width, dropout."""
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_dropout": getattr(attention, "dropout", 0.0),
    }


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
