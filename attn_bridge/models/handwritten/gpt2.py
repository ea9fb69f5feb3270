"""Hugging Face GPT-2: matrices are [in, out], q, k and v are concatenated in one, the output head is the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...printable import printable
from ...specs.gpt_model import GPTModelConfig
from ...weights.placements import Shape
from ...weights.rows import Row
from ..layout import Layout
from ..rows.attention import Table, below
from ..rows.common import TIE, is_causal_mask, is_hugely_negative, layer_norm, with_bias

_PARTS = ("query", "key", "value")

TABLE: Table = (
    Row("c_attn.weight", tuple(f"W_{one}.weight" for one in _PARTS), "o i -> i (part o)", part="part"),
    Row("c_attn.bias", tuple(f"W_{one}.bias" for one in _PARTS), "o -> (part o)", part="part"),
    *with_bias("c_proj", "out_proj", "o i -> i o"),
    Row("bias", reason="a causal mask, which our modules compute", check=is_causal_mask),
    Row("masked_bias", reason="the number that masked scores are set to", check=is_hugely_negative),
)


def write_gpt_model(config: GPTModelConfig, layout: Layout) -> dict[str, Any] | None:
    """Return the ``config.json`` of the book's model; None if the layout is for other models."""
    if layout is not LAYOUT:
        return None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.emb_dim,
        "n_head": config.n_heads,
        "n_layer": config.n_layers,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm.eps,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.drop_rate),
        "tie_word_embeddings": True,
    }


MODEL_TYPES = ("gpt2", "gpt-sw3")
"""Model types that `transformers` runs with the classes of GPT-2: its config and its model."""

BLOCK, OURS = "{prefix}h.{i}.", "trf_blocks.{i}."

LAYOUT = Layout(
    "hf-gpt2",
    "transformers GPT-2",
    [
        Row("{prefix}wte.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        Row("{prefix}wpe.weight", ("pos_emb.weight",)),
        *below(TABLE, f"{BLOCK}attn.", f"{OURS}att."),
        *with_bias(f"{BLOCK}mlp.c_fc", f"{OURS}ff.layers.0", "o i -> i o"),
        *with_bias(f"{BLOCK}mlp.c_proj", f"{OURS}ff.layers.2", "o i -> i o"),
        *layer_norm(f"{BLOCK}ln_1", f"{OURS}norm1"),
        *layer_norm(f"{BLOCK}ln_2", f"{OURS}norm2"),
        *layer_norm("{prefix}ln_f", "final_norm"),
    ],
    prefixes=("transformer.", ""),
    settings=TIE,
    defaults={"tie": 1},
    whole=True,
    model_types=MODEL_TYPES,
    form="a Conv1D, as transformers saves it",
)


def _linear(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", (f"{ours}.weight",)), Row(f"{theirs}.bias", (f"{ours}.bias",), optional=True)]


def _norm_rows(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", (f"{ours}.scale",)), Row(f"{theirs}.bias", (f"{ours}.shift",), optional=True)]


def _fused(leaf: str, axes: str) -> Row:
    names = tuple(f"{OURS}att.W_{part}.{leaf}" for part in _PARTS)
    pattern = f"{axes} -> {axes.replace('o', '(part o)', 1)}"
    return Row(f"{BLOCK}attn.c_attn.{leaf}", names, pattern, part="part", optional=leaf == "bias")


def _may_be_gpt_bigcode(names: Mapping[str, Shape | None]) -> str:
    """Return why names of nanoGPT may be of GPTBigCode; "" without biases or with the masks that nanoGPT saves."""
    bias = next((name for name in names if name.endswith("attn.c_attn.bias")), "")
    if not bias or any(name.endswith(".attn.bias") for name in names):
        return ""
    return (
        f"{printable(bias)} may be of nanoGPT, or of GPTBigCode with multi_query=False, which orders the rows by "
        "heads; --from nanogpt takes it as nanoGPT's, no layout takes the other's"
    )


NANOGPT_LAYOUT = Layout(
    "nanogpt",
    "nanoGPT, with the names of GPT-2 and matrices [out, in]; with or without biases",
    [
        Row("{prefix}wte.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        Row("{prefix}wpe.weight", ("pos_emb.weight",)),
        _fused("weight", "o i"),
        _fused("bias", "o"),
        *_linear(f"{BLOCK}attn.c_proj", f"{OURS}att.out_proj"),
        *below([row for row in TABLE if row.reason], f"{BLOCK}attn.", f"{OURS}att."),
        *_linear(f"{BLOCK}mlp.c_fc", f"{OURS}ff.layers.0"),
        *_linear(f"{BLOCK}mlp.c_proj", f"{OURS}ff.layers.2"),
        *_norm_rows(f"{BLOCK}ln_1", f"{OURS}norm1"),
        *_norm_rows(f"{BLOCK}ln_2", f"{OURS}norm2"),
        *_norm_rows("{prefix}ln_f", "final_norm"),
    ],
    prefixes=("transformer.", ""),
    settings={"tie": ()},
    defaults={"tie": 0},  # its state dict always has the head, which its strict loading asks for
    whole=True,
    model_types=("gpt2",),
    form="a torch Linear, as nanoGPT saves it",
    doubt=_may_be_gpt_bigcode,
)
