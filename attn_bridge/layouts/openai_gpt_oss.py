"""OpenAI's own files of gpt-oss: query, key and value in one projection, a layer's experts in one tensor each."""

from __future__ import annotations

from .attention import SINKS, below
from .common import HEADS
from .hf_gpt_oss import MXFP4
from .layout import Layout
from .table import Row

LAYER, OURS = "block.{i}.", "trf_blocks.{i}."
_EXPERT = f"{OURS}ff.experts.{{j}}."


def _fused(leaf: str) -> Row:
    """Return the projection that has all heads of the queries, then those of the keys, then those of the values."""
    parts = tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value"))
    split = ("num_heads", "...", "...")
    return Row(f"qkv.{leaf}", parts, "(h c) ... -> (h c) ...", along="h", split=split, sizes={"c": "head_dim"})


def _gates_and_ups(leaf: str) -> tuple[str, ...]:
    return tuple(f"{_EXPERT}{fc}.{leaf}" for fc in ("fc1", "fc2"))


LAYOUT = Layout(
    "openai-gpt-oss",
    "OpenAI's own files of gpt-oss in bfloat16",
    [
        Row("embedding.weight", ("tok_emb.weight",)),
        Row("unembedding.weight", ("out_head.weight",)),
        *below(
            (
                _fused("weight"),
                _fused("bias"),
                Row("out.weight", ("out_proj.weight",)),
                Row("out.bias", ("out_proj.bias",)),
                SINKS,
            ),
            f"{LAYER}attn.",
            f"{OURS}att.",
        ),
        *(Row(f"{LAYER}mlp.gate.{leaf}", (f"{OURS}ff.router.{leaf}",)) for leaf in ("weight", "bias")),
        Row(f"{LAYER}mlp.mlp1_weight", _gates_and_ups("weight"), "o i -> e (o part) i", part="part", stack="e"),
        Row(f"{LAYER}mlp.mlp1_bias", _gates_and_ups("bias"), "o -> e (o part)", part="part", stack="e"),
        Row(f"{LAYER}mlp.mlp2_weight", (f"{_EXPERT}fc3.weight",), "o i -> e o i", stack="e"),
        Row(f"{LAYER}mlp.mlp2_bias", (f"{_EXPERT}fc3.bias",), "o -> e o", stack="e"),
        Row(f"{LAYER}attn.norm.scale", (f"{OURS}norm1.scale",)),
        Row(f"{LAYER}mlp.norm.scale", (f"{OURS}norm2.scale",)),
        Row("norm.scale", ("final_norm.scale",)),
    ],
    settings={**HEADS, "head_dim": ("head_dim",)},
    refused=dict.fromkeys(("{rest}_weight.blocks", "{rest}_weight.scales"), MXFP4),
    whole=True,
)
