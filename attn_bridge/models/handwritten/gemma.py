"""Gemma 2 (soft caps, a window in every other layer) and Gemma 3 (norms of q and k, a base for each kind of layer).

Norms precede and follow attention and feed-forward; all of them scale by 1 + weight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.position import Rotary
from ..family import AttentionLayer, Family
from ..reading.decoders import (
    NAMES,
    activation_of,
    attention_of,
    feed_forward_of,
    read_feed_forward,
    read_rms_norm,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import make_nested_rotary, read_rotary, write_nested, write_rotary
from ..rows.attention import SPLIT
from ..rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms
from .grouped import (
    KINDS,
    attention_layer,
    check_even_heads,
    head_dim_of,
    mask_of,
    read_sizes,
    rotary_by_kind,
    write_heads,
    write_windows,
)


def read_gemma2(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Gemma 2."""
    config.refuse("use_bidirectional_attention", None, False)
    bias = config.flag("attention_bias")
    kind = config.layer_type(layer, "full_attention" if layer % 2 else "sliding_attention")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), kind),
        mask=mask_of(config, layer, kind),
        scale=config.positive("query_pre_attn_scalar") ** -0.5,
        softcap=config.number_or_none("attn_logit_softcapping"),
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def read_gemma3(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Gemma 3, also of its text model; `transformers` reads soft caps there, but ignores them."""
    config.refuse("use_bidirectional_attention", None, False)
    bias = config.flag("attention_bias")
    is_full = (layer + 1) % config.integer("sliding_window_pattern") == 0
    kind = config.layer_type(layer, "full_attention" if is_full else "sliding_attention")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_gemma3_rotary(config, kind),
        qk_norm=QKNorm("head", config.number("rms_norm_eps"), unit_offset=True),
        mask=mask_of(config, layer, kind),
        scale=config.positive("query_pre_attn_scalar") ** -0.5,
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def read_gemma3_rotary(config: ConfigFile, kind: str) -> Rotary:
    """Return the rotary positions of a kind of layers; older files scale those of full attention alone.

    As in `transformers`, their ``rope_scaling`` scales by its ``rope_type``, and not by its ``type``.
    """
    own = config.mapping("rope_parameters").get(kind) or {"rope_type": "default"}
    if kind == "full_attention":
        values = {**own, **config.mapping("rope_scaling")}
        base = values.get("rope_theta", config.get("rope_theta"))
        return make_nested_rotary(config, head_dim_of(config), values, 1_000_000.0 if base is None else base)
    base = own.get("rope_theta", config.get("rope_local_base_freq"))
    return make_nested_rotary(config, head_dim_of(config), own, 10_000.0 if base is None else base)


def _block(config: ConfigFile, layer: int, attention: Any) -> DecoderBlockConfig:
    """Return a block with norms before and after attention and feed-forward layers."""
    feed_forward = dataclasses.replace(read_feed_forward(config), activation=activation_of(config, "hidden_activation"))
    return DecoderBlockConfig(attention, feed_forward, read_rms_norm(config, unit_offset=True), norms="sandwich")


def _model(config: ConfigFile) -> dict[str, object]:
    """Return the rest of a model: scaled embeddings, a norm, a head that is usually tied, and its soft cap."""
    return {
        "norm": read_rms_norm(config, unit_offset=True),
        "tie": config.flag("tie_word_embeddings"),
        "embedding_scale": config.integer("hidden_size") ** 0.5,
        "logit_softcap": config.number_or_none("final_logit_softcapping"),
    }


def write_gemma(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Gemma 2, or of the text model of Gemma 3; `transformers` accepts integer scalars alone."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    check_even_heads(config, attention.num_heads)
    layers, windows = feed_forward_of(config, FeedForwardConfig), write_windows(config)
    is_2, scale = model_type == "gemma2", attention.scale or 1.0  # the config resolves it
    return {
        **write_sizes(config),
        **write_heads(attention),
        **windows,
        **(write_rotary(attention.position) if is_2 else write_gemma3_rotary(config, windows["layer_types"])),
        "intermediate_size": layers.hidden_dim,
        "hidden_activation": NAMES[layers.activation],
        **write_rms_norm(config),
        "attention_bias": attention.qkv_bias,
        "query_pre_attn_scalar": max(1, round(min(1 / scale / scale, 2.0**53))),
        **({"attn_logit_softcapping": attention.softcap} if is_2 else {}),
        "final_logit_softcapping": config.logit_softcap,
    }


def write_gemma3_rotary(config: DecoderConfig, kinds: list[str]) -> dict[str, Any]:
    """Return the keys that `read_gemma3_rotary` reads; older files can't scale those of layers with a window."""
    by_kind = rotary_by_kind(config, kinds)
    local = by_kind.get(KINDS[True])
    if getattr(local, "scaling", None) is not None:
        return write_nested(by_kind)
    write_nested(by_kind)  # refuses what transformers passes over
    base = getattr(local, "base", None)
    return {
        **write_rotary(by_kind.get(KINDS[False])),
        **({} if base is None else {"rope_local_base_freq": base}),
    }


_GEMMA: dict[str, object] = {
    "vocab_size": 256000,
    "intermediate_size": 9216,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_GEMMA3 = {**_GEMMA, "max_position_embeddings": 131072, "vocab_size": 262208, "sliding_window_pattern": 6}

FAMILIES = (
    Family(
        ("gemma2",),
        read_gemma2,
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        block=_block,
        model=_model,
        write=write_gemma,
        architecture="Gemma2ForCausalLM",
    ),
    Family(("gemma3",), read_gemma3, _GEMMA3, block=_block, model=_model),
    Family(
        ("gemma3_text",),
        read_gemma3,
        _GEMMA3,
        block=_block,
        model=_model,
        write=write_gemma,
        architecture="Gemma3ForCausalLM",
    ),
)


LAYOUT = decoder(
    "hf-gemma",
    "transformers Gemma 2 and 3, of Gemma 3 the text model",
    [
        *attention(SPLIT),
        *feed_forward(),
        *norms(
            norm1="input_layernorm",
            post_norm1="post_attention_layernorm",
            norm2="pre_feedforward_layernorm",
            post_norm2="post_feedforward_layernorm",
        ),
        FINAL_NORM,
    ],
    defaults={"tie": 1},
    model_types=("gemma2", "gemma3", "gemma3_text"),
)
