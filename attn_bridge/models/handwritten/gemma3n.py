"""Gemma 3n, the text model: four streams of which each layer updates one, LAuReL, sparse gates, per-layer embeddings.

Like Gemma 4, which took over the rest, it has norms of values and layers at the end that read the keys and values of
earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...specs.blocks.alternating_updates import AlternatingUpdatesConfig
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.layer_embeddings import LayerInputConfig
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ..family import AttentionLayer
from ..parts import OmittedPart
from ..reading.decoders import (
    NAMES,
    WrittenKeys,
    activation_of,
    attention_of,
    head_dim_of,
    mask_of,
    read_rms_norm,
    read_sizes,
    rotary_by_kind,
    write_heads,
    write_rms_norm,
    write_sizes,
    write_windows,
)
from ..reading.model_config import ConfigFile, as_number
from ..reading.rotary import read_rotary_by_kind, write_rotary_by_kind
from ..tables import table
from .gemma4 import (
    kinds_by_period,
    layer_embeddings_of,
    layer_of,
    lender_of,
    plain,
    unread_keys_of,
    write_layer_embeddings,
)

LOCAL_BASE = "rope_local_base_freq"
"""Key of the base of layers with a window in older files."""


def _kinds(config: ConfigFile) -> list[str]:
    """Return the kind of every layer; every fifth has full attention by default."""
    return kinds_by_period(config, 5)


def read_gemma3n(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Gemma 3n."""
    config.refuse("use_bidirectional_attention", None, False)
    kinds, bias = _kinds(config), config.flag("attention_bias")
    is_shared = lender_of(config, kinds, layer) is not None
    norm = QKNorm("head", config.number("rms_norm_eps"))
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary_by_kind(config, head_dim_of(config), kinds[layer], local_key=LOCAL_BASE),
        qk_norm=norm,
        mask=mask_of(config, layer, kinds[layer]),
        scale=1.0,
        value_norm=None if is_shared else norm.eps,
        shared=is_shared,
    )
    return layer_of(table("hf-gemma3n"), config, layer, spec)


def _of_layer(config: ConfigFile, key: str, layer: int) -> object:
    """Return a layer's value of a key that has one per layer.

    Raises:
        ValueError: it has another number of values.
    """
    values, layers = config.get(key), config.integer("num_hidden_layers")
    if not isinstance(values, Sequence) or len(values) != layers:
        raise ValueError(f"{key} of {config.model_type} must be a list of {layers} values, one per layer")
    return values[layer]


def read_block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block of Gemma 3n."""
    # It bounds coefficients in training alone; published weights are far below.
    config.refuse("altup_coef_clip", 120.0)
    width, activation = config.integer("hidden_size"), plain(activation_of(config, "hidden_activation"))
    hidden = config
    if isinstance(config.get("intermediate_size"), Sequence):
        hidden = config.with_given({**config.given, "intermediate_size": _of_layer(config, "intermediate_size", layer)})
    sparsity = 0.95 if config.integer("num_hidden_layers") > 10 and layer < 10 else 0.0
    if config.get("activation_sparsity_pattern") is not None:
        values = _of_layer(config, "activation_sparsity_pattern", layer)
        sparsity = max(0.0, as_number(f"activation_sparsity_pattern of {config.model_type}", values))
    updates = AlternatingUpdatesConfig(
        width,
        config.integer("altup_num_inputs"),
        config.integer("altup_active_idx", 0),
        config.number("rms_norm_eps"),
        config.flag("altup_correct_scale"),
    )
    return DecoderBlockConfig(
        attention,
        FeedForwardConfig(width, hidden.integer("intermediate_size"), activation, sparsity=sparsity),
        read_rms_norm(config),
        norms="sandwich",
        keys_of=lender_of(config, _kinds(config), layer),
        layer_input=LayerInputConfig(config.integer("hidden_size_per_layer_input"), activation),
        laurel_rank=config.integer("laurel_rank"),
        updates=updates,
    )


def read_model(config: ConfigFile) -> dict[str, object]:
    """Return the rest of a model: scaled embeddings, those of the layers, a norm, a head and its soft cap."""
    return {
        "norm": read_rms_norm(config),
        "tie": config.flag("tie_word_embeddings"),
        "embedding_scale": config.integer("hidden_size") ** 0.5,
        "logit_softcap": config.number_or_none("final_logit_softcapping"),
        "layer_embeddings": layer_embeddings_of(config),
    }


def write_gemma3n(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Gemma 3n."""
    attention, windows, updates = (
        attention_of(config, GroupedQueryAttentionConfig),
        write_windows(config),
        config.updates,
    )
    layers = [block.feed_forward for block in config.blocks]
    if updates is None:
        raise ValueError("updates of blocks (None) can't be left out there")
    if not all(isinstance(one, FeedForwardConfig) for one in layers):
        raise ValueError("feed_forward of a block is no FeedForwardConfig")
    return {
        **write_sizes(config),
        **write_rms_norm(config),
        **write_heads(attention),
        **windows,
        **write_rotary_by_kind(rotary_by_kind(config, windows["layer_types"]), 1_000_000.0, LOCAL_BASE),
        **write_layer_embeddings(config),
        "attention_bias": attention.qkv_bias,
        "intermediate_size": [getattr(one, "hidden_dim", None) for one in layers],
        "activation_sparsity_pattern": [getattr(one, "sparsity", None) for one in layers],
        "hidden_activation": NAMES[getattr(layers[0], "activation", "gelu_tanh")],
        "num_kv_shared_layers": sum(block.keys_of is not None for block in config.blocks),
        "laurel_rank": config.blocks[0].laurel_rank,
        "altup_num_inputs": updates.num_streams,
        "altup_active_idx": updates.active,
        "altup_correct_scale": updates.scale_corrected,
        "final_logit_softcapping": config.logit_softcap,
    }


def unread_keys(config: Mapping[str, object]) -> tuple[OmittedPart, ...]:
    """Return the projections and norms of keys and values in layers that read those of others: files have them."""
    return unread_keys_of(config, "gemma3n_text", _kinds)
