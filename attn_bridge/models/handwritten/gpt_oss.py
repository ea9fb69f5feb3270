"""Tensors of gpt-oss, as `transformers` names them and as OpenAI's own files do."""

from __future__ import annotations

from ...weights.rows import Row
from ..layout import Layout
from ..rows.attention import SINKS, SPLIT, Table, below
from ..rows.common import HEADS
from ..rows.decoder import FINAL_NORM, LAYER, OURS, attention, decoder, norms


def _side_by_side(leaf: str) -> Row:
    parts = tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value"))
    return Row(f"qkv.{leaf}", parts, "o ... -> o ...", along="o")


OPENAI: Table = (
    _side_by_side("weight"),
    _side_by_side("bias"),
    Row("out.weight", ("out_proj.weight",)),
    Row("out.bias", ("out_proj.bias",)),
    SINKS,
    Row("norm.scale", reason="the norm before attention"),
)
"""The names of OpenAI's own files, below ``block.0.attn.``: query, key and value are concatenated."""

MXFP4 = "experts in MXFP4, which can't be rearranged; --dequantize makes bfloat16 of them"
"""Reason to refuse experts in their published form."""

_THEIRS, _EXPERT = f"{LAYER}mlp.experts.", f"{OURS}ff.experts.{{j}}."


def _gate_and_up(leaf: str) -> tuple[str, ...]:
    return tuple(f"{_EXPERT}{fc}.{leaf}" for fc in ("fc1", "fc2"))


LAYOUT = decoder(
    "hf-gpt-oss",
    "transformers gpt-oss in bfloat16",
    [
        *attention((*SPLIT, SINKS)),
        *(Row(f"{LAYER}mlp.router.{leaf}", (f"{OURS}ff.router.{leaf}",)) for leaf in ("weight", "bias")),
        Row(f"{_THEIRS}gate_up_proj", _gate_and_up("weight"), "o i -> e i (o part)", part="part", stack="e"),
        Row(f"{_THEIRS}gate_up_proj_bias", _gate_and_up("bias"), "o -> e (o part)", part="part", stack="e"),
        Row(f"{_THEIRS}down_proj", (f"{_EXPERT}fc3.weight",), "o i -> e i o", stack="e"),
        Row(f"{_THEIRS}down_proj_bias", (f"{_EXPERT}fc3.bias",), "o -> e o", stack="e"),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    refused=dict.fromkeys(("{rest}_proj_blocks", "{rest}_proj_scales"), MXFP4),
    model_types=("gpt_oss",),
)


_BLOCK, _OURS = "block.{i}.", "trf_blocks.{i}."
_EXPERT_OF_BLOCK = f"{_OURS}ff.experts.{{j}}."


def _fused(leaf: str) -> Row:
    """Return the row of a projection with all query heads, then all key heads, then all value heads."""
    parts = tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value"))
    split = ("num_heads", "...", "...")
    return Row(f"qkv.{leaf}", parts, "(h c) ... -> (h c) ...", along="h", split=split, sizes={"c": "head_dim"})


def _gates_and_ups(leaf: str) -> tuple[str, ...]:
    return tuple(f"{_EXPERT_OF_BLOCK}{fc}.{leaf}" for fc in ("fc1", "fc2"))


OPENAI_LAYOUT = Layout(
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
            f"{_BLOCK}attn.",
            f"{_OURS}att.",
        ),
        *(Row(f"{_BLOCK}mlp.gate.{leaf}", (f"{_OURS}ff.router.{leaf}",)) for leaf in ("weight", "bias")),
        Row(f"{_BLOCK}mlp.mlp1_weight", _gates_and_ups("weight"), "o i -> e (o part) i", part="part", stack="e"),
        Row(f"{_BLOCK}mlp.mlp1_bias", _gates_and_ups("bias"), "o -> e (o part)", part="part", stack="e"),
        Row(f"{_BLOCK}mlp.mlp2_weight", (f"{_EXPERT_OF_BLOCK}fc3.weight",), "o i -> e o i", stack="e"),
        Row(f"{_BLOCK}mlp.mlp2_bias", (f"{_EXPERT_OF_BLOCK}fc3.bias",), "o -> e o", stack="e"),
        Row(f"{_BLOCK}attn.norm.scale", (f"{_OURS}norm1.scale",)),
        Row(f"{_BLOCK}mlp.norm.scale", (f"{_OURS}norm2.scale",)),
        Row("norm.scale", ("final_norm.scale",)),
    ],
    settings={**HEADS, "head_dim": ("head_dim",)},
    refused=dict.fromkeys(("{rest}_weight.blocks", "{rest}_weight.scales"), MXFP4),
    whole=True,
)
