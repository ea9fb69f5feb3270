"""Hugging Face gpt-oss: sinks, biases, and the experts of a layer in one tensor, their gates and ups in turn."""

from __future__ import annotations

from .attention import SINKS, SPLIT
from .hf_decoder import FINAL_NORM, LAYER, OURS, attention, decoder, norms
from .table import Row

MXFP4 = "experts in MXFP4, which can't be rearranged; dequantise the checkpoint to bfloat16 first"
"""Why experts as they are published are refused."""

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
