"""Whole decoders from a ``config.json``: blocks, embeddings and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from ...masks import Mask, causal, sliding_window
from ...printable import printable
from ...specs.base import Config
from ...specs.blocks.feed_forward import FeedForwardConfig, HiddenActivation
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.differential_attention import DifferentialAttentionConfig
from ...specs.encoder_decoder_model import EncoderDecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.rms_norm import RMSNormConfig
from ..layout import MAX_SIZE
from .model_config import ConfigFile

Block = Callable[[ConfigFile, int, Any], DecoderBlockConfig]
"""From a config, the index of a block and the config of its attention to that of the block."""
Model = Callable[[ConfigFile], dict[str, Any]]
"""From a config to the arguments of a `DecoderConfig` other than vocabulary, width and blocks."""
Pair = Callable[[ConfigFile, Collection[str]], EncoderDecoderConfig]
"""From a config and the names of its tensors to an encoder with its decoder."""
Write = Callable[[Any, str], dict[str, Any]]
"""From a whole model and a ``model_type`` to keys of a config.json; values without a key are left out or refused.

The model is of the class that the family reads: a decoder, or an encoder with one.
"""

WrittenKeys: TypeAlias = dict[str, Any]
"""Keys of a config.json, as a family writes them."""

Part = TypeVar("Part")

MAX_LAYERS = 4096
"""Maximum blocks of a model; a config with more is broken."""

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


def read_feed_forward(config: ConfigFile, *, width: str = "intermediate_size", bias: str = "") -> FeedForwardConfig:
    """Return gated feed-forward layers, as Llama has them.

    Args:
        config: the model's.
        width: key of the width between the matrices.
        bias: key of whether they have biases; "" for no biases.
    """
    return FeedForwardConfig(
        config.integer("hidden_size"),
        config.integer(width),
        activation_of(config),
        bias=config.flag(bias) if bias else False,
    )


def write_feed_forward(
    layers: FeedForwardConfig, *, width: str = "intermediate_size", bias: str = ""
) -> dict[str, object]:
    """Return the keys that `read_feed_forward` reads."""
    return {width: layers.hidden_dim, "hidden_act": NAMES[layers.activation], **({bias: layers.bias} if bias else {})}


def read_rms_norm(config: ConfigFile) -> RMSNormConfig:
    """Return the norm of a model that has one kind of norms."""
    return RMSNormConfig(config.integer("hidden_size"), config.number("rms_norm_eps"))


def write_rms_norm(config: DecoderConfig) -> WrittenKeys:
    """Return the key that `read_rms_norm` reads."""
    return {"rms_norm_eps": config.blocks[0].norm.eps}


def read_llama_model(config: ConfigFile) -> dict[str, object]:
    """Return the rest of a model as Llama has it: a final norm, and a head that may be tied."""
    return {"norm": read_rms_norm(config), "tie": config.flag("tie_word_embeddings")}


def inverse(formula: Callable[[float], float], value: float, near: float) -> float:
    """Return the shortest number near a guess that a formula maps to a value, exact to the last bit if possible."""
    rounded = [round(near, digits) for digits in range(17)]
    candidates = [one for one in (*rounded, *(math.nextafter(near, to) for to in (0.0, math.inf))) if one > 0]
    return next((one for one in candidates if formula(one) == value), near)


def write_llama_decoder(config: DecoderConfig, *, bias: str = "") -> dict[str, Any]:
    """Return the keys of blocks and rest of a decoder like Llama, except attention.

    Args:
        config: of the decoder.
        bias: key of whether feed-forward layers have biases; "" if the family has none.
    """
    layers = feed_forward_of(config, FeedForwardConfig)
    return {**write_sizes(config), **write_feed_forward(layers, bias=bias), **write_rms_norm(config)}


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
    return _first("attention", (block.attention for block in config.blocks), kind)


def feed_forward_of(config: DecoderConfig, kind: type[Part]) -> Part:
    """Return the first feed-forward layers of a kind, or experts; `ValueError` where no block has them."""
    return _first("feed_forward", (block.feed_forward for block in config.blocks), kind)


def has_experts(config: DecoderConfig) -> list[bool]:
    """Return for every block whether it has experts."""
    return [isinstance(block.feed_forward, MixtureOfExpertsConfig) for block in config.blocks]


def _first(name: str, parts: Iterable[object], kind: type[Part]) -> Part:
    instances = [one for one in parts if isinstance(one, kind)]
    if not instances:
        raise ValueError(f"{name} of no block is a {kind.__name__}")
    return instances[0]


def make_decoder(
    config: ConfigFile, depth: str, attention: Callable[[ConfigFile, int], Config | None], block: Block, model: Model
) -> DecoderConfig:
    """Return the config of a whole decoder.

    Args:
        config: the model's.
        depth: key of the number of its blocks.
        attention: from the config and the index of a block to the config of its attention, or None.
        block: to that of the block.
        model: to the rest.
    """
    layers = config.integer(depth)
    if layers > MAX_LAYERS:
        raise ValueError(f"{depth} ({layers}) of {config.model_type} must be at most {MAX_LAYERS}")
    blocks = (block(config, layer, attention(config, layer)) for layer in range(layers))
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        emb_dim=config.integer("hidden_size"),
        blocks=tuple(blocks),
        **model(config),
    )


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
            size, most = read.integer(key, least), MAX_LAYERS if key in LAYERS else MAX_SIZE
            if size > most:
                raise ValueError(f"{key} ({size}) of {read.model_type} must be at most {most}")


KINDS = ("full_attention", "sliding_attention")
"""Names of a layer's kind: without and with the window."""


def read_sizes(config: ConfigFile) -> dict[str, Any]:
    """Return the arguments with the same keys in every family: widths, heads, dropout."""
    heads = config.integer("num_attention_heads")
    width = config.integer("hidden_size")
    return {
        "d_in": width,
        "num_heads": heads,
        "num_kv_heads": config.integer_or_none("num_key_value_heads"),
        "head_dim": config.integer_or_none("head_dim"),
        "dropout": config.number_or_none("attention_dropout") or 0.0,
    }


def write_heads(attention: GroupedQueryAttentionConfig | DifferentialAttentionConfig) -> WrittenKeys:
    """Return the keys that `read_sizes` reads, except the width of the model."""
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


def check_even_heads(config: DecoderConfig, heads: int) -> None:
    """Refuse a number of heads that does not divide the width, as `transformers` does for some families.

    Raises:
        ValueError: it does not.
    """
    if config.emb_dim % heads:
        raise ValueError(f"emb_dim ({config.emb_dim}) must be a multiple of num_heads ({heads}) there")


def head_dim_of(config: ConfigFile) -> int:
    """Return the width of a head."""
    head_dim = config.integer_or_none("head_dim")
    return config.integer("hidden_size") // config.integer("num_attention_heads") if head_dim is None else head_dim


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
