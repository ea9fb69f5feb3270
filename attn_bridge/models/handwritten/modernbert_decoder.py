"""The decoder of ModernBERT (arXiv 2412.13663; Ettin, 2507.11412): no norm before the attention of the first block."""

from __future__ import annotations

from collections.abc import Mapping

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.layer_norm import LayerNormConfig
from ..family import AttentionLayer
from ..reading.decoders import NAMES, WrittenKeys, activation_of, feed_forward_of, write_sizes
from ..reading.grouped import KINDS, mask_of, window_of
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_nested_rotary, write_nested
from ..tables import table
from ..tables.layers import attention_of_layer

BASES = {KINDS[False]: ("global_rope_theta", 160000.0), KINDS[True]: ("local_rope_theta", 10000.0)}
"""Kind of a layer -> the key of the base of its positions in older files, and its default."""

INTERVAL = "global_attn_every_n_layers"
"""Key of older files: the first of that many layers has no window, and so on."""


def prepare(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with the width of the window, and with a base of positions for each kind of layers."""
    local = keys.get("local_attention", 128)
    window = local // 2 if type(local) is int else local
    rotary = keys.get("rope_parameters") or {}
    prepared = {"sliding_window": window, **keys}
    if isinstance(rotary, Mapping) and rotary.keys() <= BASES.keys():
        prepared["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": keys.get(key, base), **(rotary.get(kind) or {})}
            for kind, (key, base) in BASES.items()
        }
    return prepared


def read_modernbert(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return attention, in full in every third layer, and in a window in the others."""
    width, heads, bias = (
        config.integer("hidden_size"),
        config.integer("num_attention_heads"),
        config.flag("attention_bias"),
    )
    config.refuse("head_dim", None, width // heads)
    kind = config.layer_type(layer, KINDS[layer % config.integer(INTERVAL) != 0])
    attention = GroupedQueryAttentionConfig(
        width,
        heads,
        qkv_bias=bias,
        out_bias=bias,
        dropout=config.number_or_none("attention_dropout") or 0.0,
        position=read_nested_rotary(config, width // heads, kind),
        mask=mask_of(config, layer, kind),
    )
    return attention_of_layer(table("hf-modernbert-decoder"), config, layer, attention)


def _norm(config: ConfigFile) -> LayerNormConfig:
    return LayerNormConfig(config.integer("hidden_size"), config.positive("norm_eps"), bias=config.flag("norm_bias"))


def read_block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block, the first without a norm before its attention."""
    layers = FeedForwardConfig(
        config.integer("hidden_size"),
        config.integer("intermediate_size"),
        activation_of(config, "hidden_activation"),
        bias=config.flag("mlp_bias"),
    )
    return DecoderBlockConfig(attention, layers, _norm(config), norms="pre" if layer else "pre_last")


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the norms of embeddings and output, and the layer before the head."""
    norm = _norm(config)
    return {
        "norm": norm,
        "embedding_norm": norm,
        "head_activation": activation_of(config, "classifier_activation"),
        "head_norm": norm,
        "head_linear_bias": config.flag("classifier_bias"),
        "head_bias": config.flag("decoder_bias"),
        "tie": config.flag("tie_word_embeddings"),
    }


def write_modernbert(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of the decoder of ModernBERT."""
    norm, layers = config.blocks[0].norm, feed_forward_of(config, FeedForwardConfig)
    attentions = [block.attention for block in config.blocks]
    first = attentions[0]
    if not isinstance(first, GroupedQueryAttentionConfig) or config.head_activation is None:
        raise ValueError(f"a decoder without grouped-query attention and a layer before the head is not {model_type}")
    windows = [window_of(each.mask) for each in attentions if isinstance(each, GroupedQueryAttentionConfig)]
    kinds = [KINDS[window is not None] for window in windows]
    positions = {kind: getattr(each, "position", None) for kind, each in zip(kinds, attentions, strict=False)}
    window = next((window for window in windows if window is not None), 64)
    return {
        **write_sizes(config),
        **write_nested(positions),
        "num_attention_heads": first.num_heads,
        "intermediate_size": layers.hidden_dim,
        "hidden_activation": NAMES[layers.activation],
        "classifier_activation": NAMES[config.head_activation],
        "norm_eps": norm.eps,
        "norm_bias": getattr(norm, "bias", False),
        "attention_bias": first.qkv_bias,
        "attention_dropout": first.dropout,
        "mlp_bias": layers.bias,
        "classifier_bias": config.head_linear_bias,
        "decoder_bias": config.head_bias,
        "local_attention": 2 * window,
        "sliding_window": window,
        "layer_types": kinds,
        # Numbers of tokens must not be null there, and their defaults are of a larger vocabulary.
        **dict.fromkeys(("bos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"), 0),
    }
