"""OLMo (some clip q, k and v), OLMo 2 (norms of whole projections), OLMo 3 (and a window in three of four layers).

The norms of OLMo 1 have no weights; OLMo 2 and 3 have norms after attention and feed-forward alone.
"""

from __future__ import annotations

from typing import Any

from ...masks import causal
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.layer_norm import LayerNormConfig
from ...specs.position import Rotary
from ..family import AttentionLayer, Family
from ..reading.decoders import attention_of, read_feed_forward, read_rms_norm, write_llama_decoder
from ..reading.model_config import ConfigFile
from ..reading.rotary import make_nested_rotary, read_rotary, write_nested, write_rotary
from ..rows.attention import SPLIT
from ..rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms
from .grouped import (
    KINDS,
    attention_layer,
    head_dim_of,
    mask_of,
    read_sizes,
    rotary_by_kind,
    write_heads,
    write_windows,
)


def read_olmo(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of OLMo 1, 2 or 3."""
    bias = config.flag("attention_bias")
    slides = config.model_type == "olmo3"
    kind = config.layer_type(layer, "full_attention" if (layer + 1) % 4 == 0 else "sliding_attention") if slides else ""
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=_olmo3_rotary(config, kind) if slides else read_rotary(config, head_dim_of(config)),
        qk_norm=None if config.model_type == "olmo" else QKNorm("full", config.number("rms_norm_eps")),
        mask=mask_of(config, layer, kind) if slides else causal(),
        clip=config.number_or_none("clip_qkv") if config.model_type == "olmo" else None,
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def _olmo3_rotary(config: ConfigFile, kind: str) -> Rotary:
    """Return the rotary positions of a kind of layers.

    `transformers` applies ``rope_scaling`` and ``rope_theta`` of older files to full attention alone, where it scales
    by its ``rope_type``, and not by its ``type``; all published files have the default base.
    """
    values = dict(config.mapping("rope_parameters").get(kind) or {"rope_type": "default"})
    base = values.get("rope_theta")
    if kind == "full_attention":
        values |= config.mapping("rope_scaling")
        base = values.get("rope_theta", config.get("rope_theta"))
    return make_nested_rotary(config, head_dim_of(config), values, 500_000.0 if base is None else base)


def _block(config: ConfigFile, layer: int, attention: Any) -> DecoderBlockConfig:
    """Return a block of OLMo 1, whose norms have no weights, or of OLMo 2 and 3, with norms after each sublayer."""
    if config.model_type == "olmo":
        return DecoderBlockConfig(attention, read_feed_forward(config), _plain_norm(config))
    return DecoderBlockConfig(attention, read_feed_forward(config), read_rms_norm(config), norms="post")


def _model_of_olmo1(config: ConfigFile) -> dict[str, object]:
    return {"norm": _plain_norm(config), "tie": config.flag("tie_word_embeddings")}


def _plain_norm(config: ConfigFile) -> LayerNormConfig:
    return LayerNormConfig(config.integer("hidden_size"), 1e-5, affine=False)


def write_olmo(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of OLMo 1, 2 or 3."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    windows = write_windows(config) if model_type == "olmo3" else {}
    written = {
        **write_heads(attention),
        **windows,
        **(_write_olmo3_rotary(config, windows["layer_types"]) if windows else write_rotary(attention.position)),
        "attention_bias": attention.qkv_bias,
        **write_llama_decoder(config),
    }
    if model_type != "olmo":
        return written
    del written["rms_norm_eps"]
    return {**written, "clip_qkv": attention.clip}


def _write_olmo3_rotary(config: DecoderConfig, kinds: list[str]) -> dict[str, Any]:
    """Return the keys that `_olmo3_rotary` reads, by their older names where these mean the same in all versions."""
    by_kind = rotary_by_kind(config, kinds)
    nested, local = write_nested(by_kind), by_kind.get(KINDS[True])
    usual = all(getattr(one, "base", None) == 500_000.0 for one in by_kind.values())
    if not usual or KINDS[False] not in by_kind or getattr(local, "scaling", None) is not None:
        return nested
    return write_rotary(by_kind[KINDS[False]])


_OLMO: dict[str, object] = {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
}

FAMILIES = (
    Family(
        ("olmo",),
        read_olmo,
        _OLMO,
        block=_block,
        model=_model_of_olmo1,
        write=write_olmo,
        architecture="OlmoForCausalLM",
    ),
    Family(
        ("olmo2",),
        read_olmo,
        {**_OLMO, "rms_norm_eps": 1e-5},
        block=_block,
        write=write_olmo,
        architecture="Olmo2ForCausalLM",
    ),
    Family(
        ("olmo3",),
        read_olmo,
        {**_OLMO, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        block=_block,
        write=write_olmo,
        architecture="Olmo3ForCausalLM",
    ),
)


LAYOUTS = [
    decoder(
        "hf-olmo",
        "transformers OLMo 1",
        [*attention(row for row in SPLIT if "norm" not in row.theirs), *feed_forward()],
        model_types=("olmo",),
    ),
    decoder(
        "hf-olmo2",
        "transformers OLMo 2 and 3",
        [
            *attention(SPLIT, required=("q_norm", "k_norm")),
            *feed_forward(),
            *norms(post_norm1="post_attention_layernorm", post_norm2="post_feedforward_layernorm"),
            FINAL_NORM,
        ],
        model_types=("olmo2", "olmo3"),
    ),
]
