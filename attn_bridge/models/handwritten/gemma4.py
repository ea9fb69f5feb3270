"""Gemma 4, the text model: wider heads in layers of full attention, keys as values, shared keys, per-layer embeddings.

Norms precede and follow attention and feed-forward layers, and scale by their weight alone. Layers at the end read the
keys and values of the last earlier layer of their kind. Some models have experts next to the feed-forward layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ...specs.blocks.feed_forward import Activation, FeedForwardConfig, HiddenActivation
from ...specs.blocks.layer_embeddings import LayerEmbeddingsConfig, LayerInputConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...weights.rows import Row
from .. import families
from ..family import AttentionLayer
from ..layout import Layout
from ..parts import OmittedPart
from ..reading.decoders import (
    KINDS,
    NAMES,
    WrittenKeys,
    activation_of,
    mask_of,
    read_rms_norm,
    window_of,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..reading.multimodal import text_of
from ..reading.rotary import read_proportional_rotary, write_proportional
from ..tables import table
from ..tables.layers import attention_of_layer

SLIDING, FULL = KINDS[True], KINDS[False]

UNREAD = ("k_proj", "v_proj", "k_norm", "v_norm")
"""Modules of a layer that one with the keys and values of another has no use for."""


def kinds_of(config: ConfigFile) -> list[str]:
    """Return the kind of every layer; every sixth has full attention by default, and the last always."""
    return [*kinds_by_period(config, 6)[:-1], FULL]


def kinds_by_period(config: ConfigFile, period: int) -> list[str]:
    """Return the kind of every layer; one in `period` has full attention by default.

    Raises:
        ValueError: ``layer_types`` has more or fewer entries than there are layers.
    """
    layers, types = config.integer("num_hidden_layers"), config.get("layer_types")
    if isinstance(types, Sequence) and len(types) != layers:
        raise ValueError(f"layer_types of {config.model_type} has {len(types)} entries for {layers} layers")
    return [config.layer_type(layer, SLIDING if (layer + 1) % period else FULL) for layer in range(layers)]


def lender_of(config: ConfigFile, kinds: Sequence[str], layer: int) -> int | None:
    """Return the earlier layer whose keys and values a layer reads; None for a layer that projects them.

    Raises:
        ValueError: no layer of its kind projects keys.
    """
    first = len(kinds) - config.integer("num_kv_shared_layers", 0)
    if layer < first:
        return None
    lenders = [number for number in range(max(first, 0)) if kinds[number] == kinds[layer]]
    if not lenders:
        raise ValueError(
            f"num_kv_shared_layers ({config.get('num_kv_shared_layers')}) of {config.model_type} leaves no layer of "
            f"type {kinds[layer]} with keys"
        )
    return lenders[-1]


def sizes_of(config: ConfigFile, kinds: Sequence[str], layer: int) -> tuple[int, int]:
    """Return the width of a head and the number of key heads of a layer.

    `transformers` 5.23 writes both in ``per_layer_config``; older files have further keys for full attention.

    Raises:
        ValueError: layers of one kind differ, or a layer differs in another value.
    """
    if "per_layer_config" not in config:
        head_dim, heads = config.integer("head_dim"), config.integer("num_key_value_heads")
        if kinds[layer] == FULL:
            head_dim = config.integer("global_head_dim")
            if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
                heads = config.integer("num_global_key_value_heads")
        return head_dim, heads
    sizes = [_own_sizes(config, number) for number in range(len(kinds))]
    for number, kind in enumerate(kinds):
        if kind == kinds[layer] and sizes[number] != sizes[layer]:
            raise ValueError(
                f"per_layer_config of {config.model_type} must be the same for all layers of type {kind}, but layers "
                f"{min(number, layer)} and {max(number, layer)} differ"
            )
    return sizes[layer]


def _own_sizes(config: ConfigFile, layer: int) -> tuple[int, int]:
    # JSON has no integers as keys, but a config in memory may.
    values = {str(key): value for key, value in config.mapping("per_layer_config").items()}.get(str(layer)) or {}
    unknown = [key for key in values if key not in ("head_dim", "num_key_value_heads")]
    if unknown:
        raise ValueError(f"per_layer_config of {config.model_type} must not change {unknown[0]}")
    own = config.with_given({**config.given, **values})
    return own.integer("head_dim"), own.integer("num_key_value_heads")


def read_gemma4(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Gemma 4; ``vision`` in ``use_bidirectional_attention`` concerns tokens of images alone."""
    config.refuse("use_bidirectional_attention", None, "vision")
    config.refuse("rope_scaling", None)
    kinds, bias = kinds_of(config), config.flag("attention_bias")
    head_dim, heads = sizes_of(config, kinds, layer)
    is_shared = lender_of(config, kinds, layer) is not None
    norm = QKNorm("head", config.number("rms_norm_eps"))
    spec = GroupedQueryAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=heads,
        head_dim=head_dim,
        dropout=config.number_or_none("attention_dropout") or 0.0,
        qkv_bias=bias,
        out_bias=bias,
        position=read_proportional_rotary(config, head_dim, kinds[layer]),
        qk_norm=norm,
        mask=mask_of(config, layer, kinds[layer]),
        scale=1.0,
        value_norm=None if is_shared else norm.eps,
        key_is_value=not is_shared and kinds[layer] == FULL and config.flag("attention_k_eq_v"),
        shared=is_shared,
    )
    return layer_of(table("hf-gemma4"), config, layer, spec)


def read_block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block, whose feed-forward layers are twice as wide in some models if it reads keys of another."""
    keys_of, norm = lender_of(config, kinds_of(config), layer), read_rms_norm(config)
    width, activation = config.integer("hidden_size"), activation_of(config, "hidden_activation")
    hidden = config.integer("intermediate_size")
    if keys_of is not None and config.flag("use_double_wide_mlp"):
        hidden *= 2
    layers = FeedForwardConfig(width, hidden, plain(activation))
    experts = None
    if config.flag("enable_moe_block"):
        experts = MixtureOfExpertsConfig(
            dataclasses.replace(layers, hidden_dim=config.integer("moe_intermediate_size")),
            config.integer("num_experts"),
            config.integer("top_k_experts"),
            Router(norm=norm, input_scale=width**-0.5, expert_scales=True),
            norm=norm,
        )
    dim = config.integer("hidden_size_per_layer_input", 0)
    return DecoderBlockConfig(
        attention,
        layers if experts is None else experts,
        norm,
        norms="sandwich",
        dense=None if experts is None else layers,
        keys_of=keys_of,
        layer_input=LayerInputConfig(dim, plain(activation)) if dim else None,
        scaled=True,
    )


def plain(activation: HiddenActivation) -> Activation:
    """Return an activation that a gate can have.

    Raises:
        ValueError: its numbers are learned.
    """
    if activation == "xielu":
        raise ValueError(f"hidden_activation ({activation}) has learned numbers, which no gate has")
    return activation


def layer_embeddings_of(config: ConfigFile) -> LayerEmbeddingsConfig | None:
    """Return the per-layer embeddings; None of a model without.

    Raises:
        ValueError: tokens without a row.
    """
    dim = config.integer("hidden_size_per_layer_input", 0)
    if not dim:
        return None
    tokens = config.integer("vocab_size_per_layer_input")
    return LayerEmbeddingsConfig(
        tokens, config.integer("hidden_size"), dim, config.integer("num_hidden_layers"), config.number("rms_norm_eps")
    )


def read_model(config: ConfigFile) -> dict[str, object]:
    """Return the rest of a model: scaled embeddings, those of the layers, a norm, a head and its soft cap."""
    embeddings, vocab = layer_embeddings_of(config), config.integer("vocab_size")
    if embeddings is not None and embeddings.vocab_size < vocab:
        raise ValueError(
            f"vocab_size_per_layer_input ({embeddings.vocab_size}) of {config.model_type} must be at least vocab_size "
            f"({vocab}): transformers fails at other tokens"
        )
    return {
        "norm": read_rms_norm(config),
        "tie": config.flag("tie_word_embeddings"),
        "embedding_scale": config.integer("hidden_size") ** 0.5,
        "logit_softcap": config.number_or_none("final_logit_softcapping"),
        "layer_embeddings": embeddings,
    }


def write_gemma4(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Gemma 4."""
    attentions = [each.attention for each in config.blocks if isinstance(each.attention, GroupedQueryAttentionConfig)]
    if len(attentions) < len(config.blocks):
        raise ValueError("attention of a block is no GroupedQueryAttentionConfig")
    first = attentions[0]
    kinds = [KINDS[window_of(each.mask) is not None] for each in attentions]
    by_kind = dict(zip(reversed(kinds), reversed(attentions), strict=True))
    local, full = by_kind.get(SLIDING, by_kind.get(FULL)), by_kind.get(FULL, by_kind.get(SLIDING))
    assert local is not None
    assert full is not None
    window = window_of(local.mask)
    shared = sum(block.keys_of is not None for block in config.blocks)
    return {
        **write_sizes(config),
        **write_rms_norm(config),
        **write_layer_embeddings(config),
        **_write_layers(config),
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": local.num_kv_heads,
        "head_dim": local.head_dim,
        "per_layer_config": {
            str(number): {"head_dim": each.head_dim, "num_key_value_heads": each.num_kv_heads}
            for number, each in enumerate(attentions)
            if (each.head_dim, each.num_kv_heads) != (local.head_dim, local.num_kv_heads)
        },
        "attention_dropout": first.dropout,
        "attention_bias": first.qkv_bias,
        "attention_k_eq_v": any(each.key_is_value for each in attentions),
        "layer_types": kinds,
        **({} if window is None else {"sliding_window": window}),
        "num_kv_shared_layers": shared,
        "use_bidirectional_attention": None,
        "rope_parameters": write_proportional({SLIDING: local.position, FULL: full.position}),
        "final_logit_softcapping": config.logit_softcap,
    }


def write_layer_embeddings(config: DecoderConfig) -> WrittenKeys:
    """Return the keys that `layer_embeddings_of` reads."""
    embeddings = config.layer_embeddings
    if embeddings is None:
        return {"hidden_size_per_layer_input": 0}
    return {
        "hidden_size_per_layer_input": embeddings.dim,
        "vocab_size_per_layer_input": embeddings.vocab_size,
    }


def _write_layers(config: DecoderConfig) -> WrittenKeys:
    """Return the keys of feed-forward layers and experts."""
    block = config.blocks[0]
    layers = block.feed_forward if block.dense is None else block.dense
    if not isinstance(layers, FeedForwardConfig):
        raise ValueError("dense (None) can't be left out next to experts there")
    last = config.blocks[-1]
    widest = last.feed_forward if last.dense is None else last.dense
    keys: WrittenKeys = {
        "intermediate_size": layers.hidden_dim,
        "hidden_activation": NAMES[layers.activation],
        "use_double_wide_mlp": last.keys_of is not None and getattr(widest, "hidden_dim", 0) != layers.hidden_dim,
        "enable_moe_block": isinstance(block.feed_forward, MixtureOfExpertsConfig),
    }
    if not isinstance(block.feed_forward, MixtureOfExpertsConfig):
        return keys
    experts = block.feed_forward
    return {
        **keys,
        "num_experts": experts.num_experts,
        "top_k_experts": experts.top_k,
        "moe_intermediate_size": experts.expert.hidden_dim,
    }


def layer_of(layout: Layout, config: ConfigFile, layer: int, spec: GroupedQueryAttentionConfig) -> AttentionLayer:
    """Return the attention of a layer, whose table drops the keys and values that it does not project."""
    read = attention_of_layer(layout, config, layer, spec)
    if not spec.shared:
        return read
    reason = "keys and values are those of an earlier layer"
    rows = (
        Row(row.theirs, reason=reason) if row.theirs.startswith(UNREAD) else row for row in read.tables["transformers"]
    )
    return dataclasses.replace(read, tables={"transformers": tuple(rows)})


def unread_keys(config: Mapping[str, object]) -> tuple[OmittedPart, ...]:
    """Return the projections and norms of keys and values in layers that read those of others: files may have them."""
    return unread_keys_of(config, "gemma4_text", kinds_of)


def unread_keys_of(
    config: Mapping[str, object], model_type: str, kinds_of: Callable[[ConfigFile], list[str]]
) -> tuple[OmittedPart, ...]:
    """Return those of a family.

    Args:
        config: a config.json.
        model_type: of the family.
        kinds_of: from a config to the kind of every layer.
    """
    read = ConfigFile(text_of(config), model_type, families.FAMILIES[model_type].defaults)
    try:
        kinds = kinds_of(read)
        layers = [number for number in range(len(kinds)) if lender_of(read, kinds, number) is not None]
    except (TypeError, ValueError):  # which reading the model refuses
        return ()
    reason = "its layer reads the keys and values of an earlier one"
    return tuple(
        OmittedPart(f"{{prefix}}layers.{number}.self_attn.{name}.", reason, mark="weight")
        for number in layers
        for name in UNREAD
    )
