"""BLOOM: ALiBi, a projection with query, key and value head by head, a norm of the embedding."""

from __future__ import annotations

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.layer_norm import LayerNormConfig
from ...specs.position import Alibi
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import attention_of
from ..reading.model_config import ConfigFile
from ..rows.attention import below, by_head
from ..rows.common import HEADS, TIE, layer_norm, with_bias
from .grouped import attention_layer


def read_bloom(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of BLOOM."""
    heads = config.integer("num_attention_heads")
    spec = GroupedQueryAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        qkv_bias=True,
        out_bias=True,
        position=Alibi(),
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )
    return attention_layer(
        layer, spec, {"transformers": by_head(heads)}, prefix=f"transformer.h.{layer}.self_attention."
    )


def _norm(config: ConfigFile) -> LayerNormConfig:
    return LayerNormConfig(config.integer("hidden_size"), config.number("layer_norm_epsilon"))


def _block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block of BLOOM: feed-forward layers of four times the width, without a gate."""
    config.refuse("apply_residual_connection_post_layernorm", False)
    if config.flag("slow_but_exact") and config.integer("pretraining_tp") > 1:
        config.refuse("slow_but_exact", False)  # transformers leaves biases out then
    width = config.integer("hidden_size")
    feed_forward = FeedForwardConfig(width, 4 * width, "gelu_tanh", gated=False, bias=True)
    rate = config.number_or_none("hidden_dropout") or 0.0
    return DecoderBlockConfig(attention, feed_forward, _norm(config), dropout=rate)


def _model(config: ConfigFile) -> dict[str, object]:
    """Return the rest of a model: norms of the embeddings and behind the blocks, and a head that is usually tied."""
    return {
        "norm": _norm(config),
        "embedding_norm": _norm(config),
        "tie": config.flag("tie_word_embeddings"),
    }


def write_bloom(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of BLOOM."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.emb_dim,
        "n_layer": len(config.blocks),
        "n_head": attention.num_heads,
        "layer_norm_epsilon": config.blocks[0].norm.eps,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": attention.dropout,
        "hidden_dropout": config.blocks[0].dropout,
        "tie_word_embeddings": config.tie,
    }


FAMILIES = (
    Family(
        ("bloom",),
        read_bloom,
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "vocab_size": 250880,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "apply_residual_connection_post_layernorm": False,
            "pretraining_tp": 1,
        },
        aliases={
            "num_attention_heads": ("n_head",),
            "num_hidden_layers": ("n_layer",),
            "hidden_size": ("n_embed",),
        },
        block=_block,
        model=_model,
        write=write_bloom,
        architecture="BloomForCausalLM",
    ),
)


BLOCK, OURS = "{prefix}h.{i}.", "trf_blocks.{i}."


LAYOUT = Layout(
    "hf-bloom",
    "transformers BLOOM",
    [
        Row("{prefix}word_embeddings.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        *layer_norm("{prefix}word_embeddings_layernorm", "emb_norm"),
        *below(by_head("num_heads"), f"{BLOCK}self_attention.", f"{OURS}att."),
        *with_bias(f"{BLOCK}mlp.dense_h_to_4h", f"{OURS}ff.layers.0"),
        *with_bias(f"{BLOCK}mlp.dense_4h_to_h", f"{OURS}ff.layers.2"),
        *layer_norm(f"{BLOCK}input_layernorm", f"{OURS}norm1"),
        *layer_norm(f"{BLOCK}post_attention_layernorm", f"{OURS}norm2"),
        *layer_norm("{prefix}ln_f", "final_norm"),
    ],
    prefixes=("transformer.", ""),
    settings={**TIE, **HEADS},
    defaults={"tie": 1},
    whole=True,
    model_types=("bloom",),
)
