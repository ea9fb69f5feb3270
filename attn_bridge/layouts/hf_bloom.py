"""Hugging Face BLOOM: query, key and value of a head after one another in one projection, a norm of the embedding."""

from __future__ import annotations

from .attention import below, by_head
from .hf_decoder import HEADS, TIE
from .layout import Layout
from .table import Row

BLOCK, OURS = "{prefix}h.{i}.", "trf_blocks.{i}."


def _both(theirs: str, ours: str, leaves: tuple[str, str] = ("weight", "bias")) -> list[Row]:
    return [Row(f"{theirs}.{one}", (f"{ours}.{leaf}",)) for one, leaf in zip(("weight", "bias"), leaves, strict=True)]


def _norm(theirs: str, ours: str) -> list[Row]:
    return _both(theirs, ours, ("scale", "shift"))


LAYOUT = Layout(
    "hf-bloom",
    "transformers BLOOM",
    [
        Row("{prefix}word_embeddings.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        *_norm("{prefix}word_embeddings_layernorm", "emb_norm"),
        *below(by_head("num_heads"), f"{BLOCK}self_attention.", f"{OURS}att."),
        *_both(f"{BLOCK}mlp.dense_h_to_4h", f"{OURS}ff.layers.0"),
        *_both(f"{BLOCK}mlp.dense_4h_to_h", f"{OURS}ff.layers.2"),
        *_norm(f"{BLOCK}input_layernorm", f"{OURS}norm1"),
        *_norm(f"{BLOCK}post_attention_layernorm", f"{OURS}norm2"),
        *_norm("{prefix}ln_f", "final_norm"),
    ],
    prefixes=("transformer.", ""),
    settings={**TIE, **HEADS},
    defaults={"tie": 1},
    whole=True,
    model_types=("bloom",),
)
