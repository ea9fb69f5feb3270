"""vLLM's parameters, as its models have them after loading: the names for trainers that push weights to a sampler.

Projections that read the same input are one matrix: query, key and value (``qkv_proj``), gate and up
(``gate_up_proj``), and of all experts of a layer ``w13_weight`` and ``w2_weight``. All other names are those of
`transformers`, which differ by form in norms and the location of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...weights.placements import Shape
from ...weights.rows import Row
from ..layout import Settings
from ..rows.common import FREQUENCIES, TIE
from ..rows.decoder import EMBEDDINGS, FINAL_NORM, LAYER, OURS
from ..tables import table
from .chosen import ChosenLayout, Form

NORMS: Mapping[str, Mapping[str, str]] = {
    "llama": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "gemma": {
        "norm1": "input_layernorm",
        "post_norm1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    },
    "olmo2": {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"},
}
"""Our names of a layer's norms -> theirs, by family; Mixtral has Llama's."""

HOMES = {"mixtral": "block_sparse_moe"}
"""Form -> where experts and router are; `mlp` elsewhere."""

OF_ATTENTION = f"{LAYER}self_attn."

HEADS = {
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
}


def _qkv(leaf: str) -> Row:
    parts = tuple(f"{OURS}att.W_{name}.{leaf}" for name in ("query", "key", "value"))
    pattern = "o i -> o i" if leaf == "weight" else "o -> o"
    shares = ("num_heads", "num_kv_heads", "num_kv_heads")
    return Row(f"{OF_ATTENTION}qkv_proj.{leaf}", parts, pattern, along="o", shares=shares, optional=leaf == "bias")


ATTENTION = (
    _qkv("weight"),
    _qkv("bias"),
    Row(f"{OF_ATTENTION}o_proj.weight", (f"{OURS}att.out_proj.weight",)),
    Row(f"{OF_ATTENTION}o_proj.bias", (f"{OURS}att.out_proj.bias",), optional=True),
    *(
        Row(f"{OF_ATTENTION}{name}.weight", (f"{OURS}att.{name}.scale",), optional=True)
        for name in ("q_norm", "k_norm")
    ),
    dataclasses.replace(FREQUENCIES, theirs=OF_ATTENTION + FREQUENCIES.theirs),
)


def _gate_up(leaf: str) -> Row:
    pattern = "o i -> (part o) i" if leaf == "weight" else "o -> (part o)"
    ours = tuple(f"{OURS}ff.{fc}.{leaf}" for fc in ("fc1", "fc2"))
    theirs = f"{LAYER}mlp.gate_up_proj.{leaf}"
    return Row(theirs, ours, pattern, part="part", optional=leaf == "bias", branch="feed-forward/dense")


def _experts(home: str) -> list[Row]:
    expert, branch = f"{OURS}ff.experts.{{j}}.", "feed-forward/experts"
    gates_and_ups = (f"{expert}fc1.weight", f"{expert}fc2.weight")
    stacked, down = f"{LAYER}{home}.experts.", (f"{expert}fc3.weight",)
    return [
        Row(f"{stacked}w13_weight", gates_and_ups, "o i -> e (part o) i", part="part", stack="e", branch=branch),
        Row(f"{stacked}w2_weight", down, "o i -> e o i", stack="e", branch=branch),
        Row(f"{LAYER}{home}.gate.weight", (f"{OURS}ff.router.weight",), branch=branch),
    ]


def _table(form: Form) -> list[Row]:
    kind = str(form["kind"])
    return [
        *EMBEDDINGS,
        *ATTENTION,
        _gate_up("weight"),
        _gate_up("bias"),
        *(
            Row(f"{LAYER}mlp.down_proj.{leaf}", (f"{OURS}ff.fc3.{leaf}",), optional=leaf == "bias",
                branch="feed-forward/dense")
            for leaf in ("weight", "bias")
        ),
        *_experts(HOMES.get(kind, "mlp")),
        *(
            Row(f"{LAYER}{theirs}.weight", (f"{OURS}{ours}.scale",))
            for ours, theirs in NORMS.get(kind, NORMS["llama"]).items()
        ),
        FINAL_NORM,
    ]  # fmt: skip


def _of_theirs(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    if any(".post_feedforward_layernorm." in name for name in shapes):
        return {"kind": "gemma" if any(".input_layernorm." in name for name in shapes) else "olmo2"}
    return {"kind": "mixtral" if any(f".{HOMES['mixtral']}." in name for name in shapes) else "llama"}


def _of_ours(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form for a model of ours; Mixtral alone has experts without norms of queries."""
    if any(".post_norm1." in name for name in shapes):
        return {"kind": "gemma" if any(".norm1." in name for name in shapes) else "olmo2"}
    is_mixtral = any(".ff.experts." in name for name in shapes) and not any(".q_norm." in name for name in shapes)
    return {"kind": "mixtral" if is_mixtral else "llama"}


LAYOUT = ChosenLayout(
    "vllm",
    "vLLM's parameters: Llama, Mistral, Mixtral, Qwen 2 and 3, Qwen3-MoE, Granite, Phi-3, Gemma 2 and 3, OLMo 2 and 3",
    _table,
    usual={"kind": "llama"},
    forms=[{"kind": kind} for kind in ("gemma", "olmo2", "mixtral")],
    of_theirs=_of_theirs,
    of_ours=_of_ours,
    kept=(),
    prefixes=("model.", ""),
    settings={**TIE, **HEADS},
    defaults={"tie": 0},
    whole=True,
    model_types=tuple(
        kind
        for layout in map(table, ("hf-llama", "hf-mixtral", "hf-qwen3-moe", "hf-phi3", "hf-gemma", "hf-olmo2"))
        for kind in layout.model_types
    ),
)
