"""Hugging Face GPT-2: matrices are [in, out], q, k and v side by side in one, the output head is the embedding."""

from __future__ import annotations

from .layout import Layout
from .table import Row

BLOCK, OURS = "{prefix}h.{i}.", "trf_blocks.{i}."


def _both(theirs: str, ours: str, pattern: str) -> list[Row]:
    return [Row(f"{BLOCK}{theirs}.weight", (f"{OURS}{ours}.weight",), pattern),
            Row(f"{BLOCK}{theirs}.bias", (f"{OURS}{ours}.bias",))]  # fmt: skip


def _norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", (f"{ours}.scale",)), Row(f"{theirs}.bias", (f"{ours}.shift",))]


def _projections(leaf: str) -> tuple[str, ...]:
    return tuple(f"{OURS}att.W_{name}.{leaf}" for name in ("query", "key", "value"))


LAYOUT = Layout(
    "hf-gpt2",
    "transformers GPT-2",
    [
        Row("{prefix}wte.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        Row("{prefix}wpe.weight", ("pos_emb.weight",)),
        Row(f"{BLOCK}attn.c_attn.weight", _projections("weight"), "o i -> i (part o)", part="part"),
        Row(f"{BLOCK}attn.c_attn.bias", _projections("bias"), "o -> (part o)", part="part"),
        *_both("attn.c_proj", "att.out_proj", "o i -> i o"),
        *_both("mlp.c_fc", "ff.layers.0", "o i -> i o"),
        *_both("mlp.c_proj", "ff.layers.2", "o i -> i o"),
        *_norm(f"{BLOCK}ln_1", f"{OURS}norm1"),
        *_norm(f"{BLOCK}ln_2", f"{OURS}norm2"),
        *_norm("{prefix}ln_f", "final_norm"),
        Row(f"{BLOCK}attn.bias", reason="a causal mask, which our modules compute"),
        Row(f"{BLOCK}attn.masked_bias", reason="the number that masked scores are set to"),
    ],
    prefixes=("transformer.", ""),
    settings={"tie": ("tie_word_embeddings",)},
    defaults={"tie": 1},
    whole=True,
)
