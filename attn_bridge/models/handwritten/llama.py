"""Llama and the families with its structure: Mistral (a window), Qwen 2 (biases), Qwen 3 (norms of q and k).

Their tensors by the names of `transformers`, and Llama by those of Meta's own files.
"""

from __future__ import annotations

from typing import Any

from ...specs.decoder_model import DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import attention_of, read_llama_block, read_mistral_block, write_llama_decoder
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT, Table, below, interleaved_rotary
from ..rows.common import GROUPED_HEADS, is_frequencies
from ..rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms
from .grouped import (
    KINDS,
    attention_layer,
    check_even_heads,
    head_dim_of,
    mask_of,
    read_sizes,
    window_of,
    write_heads,
    write_windows,
)


def _tables(config: GroupedQueryAttentionConfig) -> dict[str, Table]:
    has_biases = config.qkv_bias or config.out_bias
    meta = interleaved_rotary(config.num_heads, config.num_kv_heads or config.num_heads)
    return {"transformers": SPLIT} | ({} if has_biases else {"meta": meta})


def read_llama(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Llama."""
    bias = config.flag("attention_bias")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config), qkv_bias=bias, out_bias=bias, position=read_rotary(config, head_dim_of(config))
    )
    return attention_layer(layer, spec, _tables(spec))


def write_llama(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Llama."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    check_even_heads(config, attention.num_heads)
    return {**write_llama_attention(attention), **write_llama_decoder(config, bias="mlp_bias")}


def write_llama_attention(attention: GroupedQueryAttentionConfig) -> dict[str, Any]:
    """Return the keys of attention whose projections have biases all alike."""
    return {**write_heads(attention), **write_rotary(attention.position), "attention_bias": attention.qkv_bias}


def read_mistral(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mistral, Ministral or Mixtral; all have the window, if any, unless ``layer_types`` differs.

    As in `transformers`, a Mistral with ``layer_types`` is a Ministral.
    """
    kind = KINDS[config.integer_or_none("sliding_window") is not None]
    if config.model_type in ("mistral", "ministral"):
        kind = config.layer_type(layer, kind)
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        position=read_rotary(config, head_dim_of(config), kind),
        mask=mask_of(config, layer, kind),
    )
    return attention_layer(layer, spec, _tables(spec))


def write_mistral(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Mistral."""
    return {**write_windowed_attention(config), **write_llama_decoder(config)}


def write_ministral(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Ministral, with a list of the layers that have the window."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    rotary = write_rotary(attention.position)
    return {**write_heads(attention), **rotary, **write_windows(config), **write_llama_decoder(config)}


def write_windowed_attention(config: DecoderConfig) -> dict[str, object]:
    """Return the keys of attention that has the same window in all layers, and no biases."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    window = window_of(attention.mask)
    return {**write_heads(attention), **write_rotary(attention.position), "sliding_window": window}


def read_qwen(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Qwen 2, which has biases but for its output, or of Qwen 3, which has norms."""
    is_2 = config.model_type == "qwen2"
    bias = config.flag("attention_bias")
    has_window = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    slides = has_window and layer >= config.integer("max_window_layers", 0)
    kind = config.layer_type(layer, "sliding_attention" if slides else "full_attention")
    if kind == "sliding_attention" and not config.flag("use_sliding_window"):
        raise ValueError(f"layer {layer} of {config.model_type} is sliding_attention, but use_sliding_window is false")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=is_2 or bias,
        out_bias=not is_2 and bias,
        position=read_rotary(config, head_dim_of(config), kind, sections=True),
        qk_norm=None if is_2 else QKNorm("head", config.number("rms_norm_eps")),
        mask=mask_of(config, layer, kind),
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def write_qwen(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Qwen 2 or 3; older versions of `transformers` know windows by their first layer alone."""
    attention, windows = attention_of(config, GroupedQueryAttentionConfig), write_windows(config)
    kinds = windows["layer_types"]
    written = {
        **write_llama_attention(attention),
        **windows,
        "use_sliding_window": KINDS[True] in kinds,
        "max_window_layers": kinds.index(KINDS[True]) if KINDS[True] in kinds else len(kinds),
        **write_llama_decoder(config),
    }
    return {key: value for key, value in written.items() if model_type != "qwen2" or key != "attention_bias"}


_FEED_FORWARD: dict[str, object] = {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

_MISTRAL: dict[str, object] = {
    **_FEED_FORWARD,
    "intermediate_size": 14336,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

_QWEN: dict[str, object] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES = (
    Family(
        ("llama",),
        read_llama,
        {
            **_FEED_FORWARD,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "max_position_embeddings": 2048,
        },
        block=read_llama_block,
        write=write_llama,
        architecture="LlamaForCausalLM",
    ),
    Family(
        ("mistral",),
        read_mistral,
        _MISTRAL,
        block=read_mistral_block,
        write=write_mistral,
        architecture="MistralForCausalLM",
    ),
    Family(
        ("ministral",),
        read_mistral,
        _MISTRAL,
        block=read_mistral_block,
        write=write_ministral,
        architecture="MinistralForCausalLM",
    ),
    Family(
        ("qwen2",),
        read_qwen,
        _QWEN,
        block=read_mistral_block,
        write=write_qwen,
        architecture="Qwen2ForCausalLM",
    ),
    Family(
        ("qwen3",),
        read_qwen,
        {**_QWEN, "head_dim": 128, "rms_norm_eps": 1e-6},
        block=read_mistral_block,
        write=write_qwen,
        architecture="Qwen3ForCausalLM",
    ),
)


LAYOUT = decoder(
    "hf-llama",
    "transformers Llama, Mistral, Ministral, Qwen 2 and 3, Granite, SmolLM3",
    [
        *attention(SPLIT),
        *feed_forward(bias=True),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    model_types=("llama", "mistral", "qwen2", "qwen3", "granite", "ministral", "smollm3"),
)


META_LAYER, META_OURS = "layers.{i}.", "trf_blocks.{i}."


def _gated(theirs: str, ours: str, branch: str) -> list[Row]:
    return [
        Row(f"{META_LAYER}feed_forward.{theirs}{name}.weight", (f"{META_OURS}ff.{ours}{fc}.weight",), branch=branch)
        for name, fc in (("w1", "fc1"), ("w3", "fc2"), ("w2", "fc3"))
    ]


META_LAYOUT = Layout(
    "meta-llama",
    "Meta's own files of Llama, and Mistral's, Mixtral's among them",
    [
        Row("tok_embeddings.weight", ("tok_emb.weight",)),
        Row("output.weight", ("out_head.weight",)),
        *below(interleaved_rotary("num_heads", "num_kv_heads"), f"{META_LAYER}attention.", f"{META_OURS}att."),
        *_gated("", "", "feed-forward/dense"),
        *_gated("experts.{j}.", "experts.{j}.", "feed-forward/experts"),
        Row(f"{META_LAYER}feed_forward.gate.weight", (f"{META_OURS}ff.router.weight",), branch="feed-forward/experts"),
        Row(f"{META_LAYER}attention_norm.weight", (f"{META_OURS}norm1.scale",)),
        Row(f"{META_LAYER}ffn_norm.weight", (f"{META_OURS}norm2.scale",)),
        Row("norm.weight", ("final_norm.scale",)),
        Row("rope.freqs", reason="rotary frequencies, which are computed", check=is_frequencies),
    ],
    settings=GROUPED_HEADS,
    whole=True,
)
