"""Tensors of Llama and the families with its structure: by the names of `transformers`, and of Meta's own files."""

from __future__ import annotations

from ...weights.rows import Row
from ..layout import Layout
from ..rows.attention import SPLIT, below, interleaved_rotary
from ..rows.common import GROUPED_HEADS, is_frequencies
from ..rows.decoder import FINAL_NORM, attention, decoder, feed_forward, norms

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
