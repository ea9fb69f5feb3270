"""Hugging Face GPT-2: matrices are [in, out], q, k and v side by side in one, the output head is the embedding."""

from __future__ import annotations

from ..weights.rows import Row
from .common_rows import TIE, is_causal_mask, is_hugely_negative, layer_norm, with_bias
from .layout import Layout

BLOCK, OURS = "{prefix}h.{i}.", "trf_blocks.{i}."


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
        *with_bias(f"{BLOCK}attn.c_proj", f"{OURS}att.out_proj", "o i -> i o"),
        *with_bias(f"{BLOCK}mlp.c_fc", f"{OURS}ff.layers.0", "o i -> i o"),
        *with_bias(f"{BLOCK}mlp.c_proj", f"{OURS}ff.layers.2", "o i -> i o"),
        *layer_norm(f"{BLOCK}ln_1", f"{OURS}norm1"),
        *layer_norm(f"{BLOCK}ln_2", f"{OURS}norm2"),
        *layer_norm("{prefix}ln_f", "final_norm"),
        Row(f"{BLOCK}attn.bias", reason="a causal mask, which our modules compute", check=is_causal_mask),
        Row(f"{BLOCK}attn.masked_bias", reason="the number that masked scores are set to", check=is_hugely_negative),
    ],
    prefixes=("transformer.", ""),
    settings=TIE,
    defaults={"tie": 1},
    whole=True,
    model_types=("gpt2",),
)
