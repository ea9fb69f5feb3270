"""Tensors by the names of GGUF, llama.cpp's files: Llama, Mistral, Mixtral, Qwen 2, 3 and MoE, Gemma, GPT-2."""

from __future__ import annotations

import dataclasses

from ...weights.placements import Change
from ...weights.rows import Row
from ..layout import Layout
from ..rows.common import GROUPED_HEADS, TIE, is_rotary_factors

BLOCK, OURS = "blk.{i}.", "trf_blocks.{i}."
PROJECTIONS = {"attn_q": "W_query", "attn_k": "W_key", "attn_v": "W_value", "attn_output": "out_proj"}
EMBEDDINGS = [
    Row("token_embd.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
    Row("output.weight", ("out_head.weight",), optional=True),
]


def _weight(theirs: str, ours: str) -> Row:
    return Row(f"{BLOCK}{theirs}.weight", (f"{OURS}{ours}.weight",))


def _with_bias(theirs: str, ours: str) -> list[Row]:
    return [_weight(theirs, ours), Row(f"{BLOCK}{theirs}.bias", (f"{OURS}{ours}.bias",))]


def _interleaved(theirs: str, ours: str, heads: str) -> Row:
    """Return the row of a projection with interleaved rotary positions, as in Meta's own files."""
    return dataclasses.replace(
        _weight(theirs, f"att.{ours}"), pattern="(h pair c) i -> (h c pair) i", sizes={"h": heads, "pair": 2}
    )


def _norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", (f"{ours}.scale",)), Row(f"{theirs}.bias", (f"{ours}.shift",))]


MATRICES = (("gate", "fc1"), ("up", "fc2"), ("down", "fc3"))
"""Their name of a matrix of gated feed-forward layers, ours."""

DENSE, EXPERTS = "feed-forward/dense", "feed-forward/experts"


def _feed_forward() -> list[Row]:
    """Return rows of feed-forward layers, or of experts, with one tensor per matrix for all experts of a layer."""
    return [
        *(dataclasses.replace(_weight(f"ffn_{theirs}", f"ff.{ours}"), branch=DENSE) for theirs, ours in MATRICES),
        *(
            Row(f"{BLOCK}ffn_{theirs}_exps.weight", (f"{OURS}ff.experts.{{j}}.{ours}.weight",), "o i -> e o i",
                stack="e", branch=EXPERTS)
            for theirs, ours in MATRICES
        ),
        dataclasses.replace(_weight("ffn_gate_inp", "ff.router"), branch=EXPERTS),
    ]  # fmt: skip


_REST = [
    *EMBEDDINGS,
    *_feed_forward(),
    Row(f"{BLOCK}attn_norm.weight", (f"{OURS}norm1.scale",)),
    Row(f"{BLOCK}ffn_norm.weight", (f"{OURS}norm2.scale",)),
    Row("output_norm.weight", ("final_norm.scale",)),
    Row("rope_freqs.weight", reason="factors of rotary frequencies, which the config has", check=is_rotary_factors),
]

LLAMA = Layout(
    "gguf-llama",
    "GGUF's names of Llama, Mistral and Mixtral",
    [
        *_REST,
        _interleaved("attn_q", "W_query", "num_heads"),
        _interleaved("attn_k", "W_key", "num_kv_heads"),
        _weight("attn_v", "att.W_value"),
        _weight("attn_output", "att.out_proj"),
    ],
    settings={**TIE, **GROUPED_HEADS},
    defaults={"tie": 0},
    whole=True,
    model_types=("llama", "mixtral"),
)

QWEN = Layout(
    "gguf-qwen",
    "GGUF's names of Qwen 2, with biases, and Qwen 3 and Qwen3-MoE, with norms of queries and keys",
    [
        *_REST,
        *(_weight(theirs, f"att.{ours}") for theirs, ours in PROJECTIONS.items()),
        *(
            Row(f"{BLOCK}{theirs}.bias", (f"{OURS}att.{PROJECTIONS[theirs]}.bias",), optional=True)
            for theirs in ("attn_q", "attn_k", "attn_v")
        ),
        *(
            Row(f"{BLOCK}attn_{letter}_norm.weight", (f"{OURS}att.{letter}_norm.scale",), optional=True)
            for letter in "qk"
        ),
    ],
    settings=TIE,
    defaults={"tie": 0},
    whole=True,
    marks=("attn_q.bias", "attn_q_norm.weight"),  # without them the names are Llama's, in another order
    model_types=("qwen2", "qwen3", "qwen3_moe"),
)

FROM_ONE = Change(plus=1.0)
"""llama.cpp's norms of Gemma multiply by the weight in the file, those of `transformers` by 1 + weight."""

GEMMA = Layout(
    "gguf-gemma",
    "GGUF's names of Gemma 2, and of the text model of Gemma 3",
    [
        *EMBEDDINGS,
        *(_weight(f"ffn_{theirs}", f"ff.{ours}") for theirs, ours in MATRICES),
        *(_weight(theirs, f"att.{ours}") for theirs, ours in PROJECTIONS.items()),
        *(
            Row(f"{BLOCK}attn_{letter}_norm.weight", (f"{OURS}att.{letter}_norm.scale",), optional=True,
                change=FROM_ONE)
            for letter in "qk"
        ),
        *(
            Row(f"{BLOCK}{theirs}.weight", (f"{OURS}{ours}.scale",), change=FROM_ONE)
            for theirs, ours in (("attn_norm", "norm1"), ("post_attention_norm", "post_norm1"), ("ffn_norm", "norm2"),
                                 ("post_ffw_norm", "post_norm2"))
        ),
        Row("output_norm.weight", ("final_norm.scale",), change=FROM_ONE),
    ],
    settings=TIE,
    defaults={"tie": 1},
    whole=True,
    model_types=("gemma2", "gemma3_text"),
)  # fmt: skip

GPT2 = Layout(
    "gguf-gpt2",
    "GGUF's names of GPT-2",
    [
        *EMBEDDINGS,
        Row("position_embd.weight", ("pos_emb.weight",)),
        *(
            Row(f"{BLOCK}attn_qkv.{leaf}", tuple(f"{OURS}att.W_{part}.{leaf}" for part in ("query", "key", "value")),
                f"{axes} -> {axes.replace('o', '(part o)')}", part="part")
            for leaf, axes in (("weight", "o i"), ("bias", "o"))
        ),
        *_with_bias("attn_output", "att.out_proj"),
        *_with_bias("ffn_up", "ff.layers.0"),
        *_with_bias("ffn_down", "ff.layers.2"),
        *_norm(f"{BLOCK}attn_norm", f"{OURS}norm1"),
        *_norm(f"{BLOCK}ffn_norm", f"{OURS}norm2"),
        *_norm("output_norm", "final_norm"),
    ],
    settings=TIE,
    defaults={"tie": 1},
    whole=True,
    model_types=("gpt2",),
)  # fmt: skip

LAYOUTS = (LLAMA, QWEN, GEMMA, GPT2)
