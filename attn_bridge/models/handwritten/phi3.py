"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with one matrix for query, key and value, and one for gate and up."""

from __future__ import annotations

from typing import Any

from ...masks import causal, sliding_window
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.rope_scaling import LongRoPEScaling
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..reading.decoders import attention_of, read_feed_forward, read_llama_model, read_rms_norm, write_llama_decoder
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import FREQUENCIES, Size, Table
from ..rows.decoder import FINAL_NORM, LAYER, OURS, attention, decoder, norms
from .grouped import attention_layer, head_dim_of, read_sizes, window_of, write_heads


def fused(num_heads: Size, num_kv_heads: Size) -> Table:
    """Return the table of attention with all queries, then all keys, then all values in one projection."""
    parts = tuple(f"W_{name}.weight" for name in ("query", "key", "value"))
    shares = (num_heads, num_kv_heads, num_kv_heads)
    return (
        Row("qkv_proj.weight", parts, "o i -> o i", along="o", shares=shares),
        Row("o_proj.weight", ("out_proj.weight",)),
        FREQUENCIES,
    )


def read_phi3(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Phi-3; all of them have the window, if any, and a part of each head may be rotated."""
    window = config.integer_or_none("sliding_window")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        position=read_rotary(config, head_dim_of(config), partial=True, renamed=RENAMED),
        mask=causal() if window is None else sliding_window(window),
    )
    kv_heads = spec.num_kv_heads or spec.num_heads
    return attention_layer(layer, spec, {"transformers": fused(spec.num_heads, kv_heads)})


RENAMED = {"su": "longrope", "yarn": "longrope"}
"""Names that older files have for the scaling, as `transformers` reads them."""


def _block(config: ConfigFile, layer: int, attention: Any) -> DecoderBlockConfig:
    rate = config.number_or_none("resid_pdrop") or 0.0
    return DecoderBlockConfig(attention, read_feed_forward(config), read_rms_norm(config), dropout=rate)


def _model(config: ConfigFile) -> dict[str, object]:
    return {**read_llama_model(config), "dropout": config.number_or_none("embd_pdrop") or 0.0}


def write_phi3(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Phi-3; `transformers` takes its scaling alone, for heads that share the width, if at all."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    scaling = getattr(attention.position, "scaling", None)
    context = {}
    if scaling is not None:
        if not isinstance(scaling, LongRoPEScaling) or attention.head_dim != config.emb_dim // attention.num_heads:
            raise ValueError(f"scaling ({type(scaling).__name__}, heads of {attention.head_dim}) can't be said there")
        context = {"original_max_position_embeddings": scaling.original_context}
    return {
        **write_heads(attention),
        **write_rotary(attention.position, attention.head_dim),
        **context,
        "sliding_window": window_of(attention.mask),
        **write_llama_decoder(config),
        "resid_pdrop": config.blocks[0].dropout,
        "embd_pdrop": config.dropout,
    }


FAMILIES = (
    Family(
        ("phi3",),
        read_phi3,
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        block=_block,
        model=_model,
        write=write_phi3,
        architecture="Phi3ForCausalLM",
    ),
)


LAYOUT = decoder(
    "hf-phi3",
    "transformers Phi-3 and Phi-4",
    [
        *attention(fused("num_heads", "num_kv_heads")),
        Row(
            f"{LAYER}mlp.gate_up_proj.weight",
            tuple(f"{OURS}ff.{one}.weight" for one in ("fc1", "fc2")),
            "o i -> (part o) i",
            part="part",
        ),
        Row(f"{LAYER}mlp.down_proj.weight", (f"{OURS}ff.fc3.weight",)),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    settings={
        "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    },
    model_types=("phi3",),
)
