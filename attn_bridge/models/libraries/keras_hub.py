"""Backbones of KerasHub, by the paths that their weights have in files of Keras, joined by dots.

Keras numbers layers of a class from none: ``transformer_decoder``, ``transformer_decoder_1``. Kernels of projections
keep heads apart, and a layer's kernel and bias are its ``vars.0`` and ``vars.1``. Read off KerasHub 0.32.
"""

from __future__ import annotations

from ...weights.rows import Row
from ..layout import Layout
from ..ours import MATRIX
from ..parts import Part
from ..rows.common import GROUPED_HEADS, HEADS, TIE

OURS = "trf_blocks.{i}."

OPTIMIZER = Part("optimizer.", "it is the state of an optimizer, which is no part of the model")

INTO, OUT_OF = "(h c) i -> i h c", "o (h c) -> h c o"
"""Axes of projections into heads, and of the one out of them."""


def _fronts(*backbones: str) -> tuple[str, ...]:
    """Return the prefixes of a backbone alone, and of one in a model for a task."""
    return ("layers.", *(f"layers.{name}.layers." for name in backbones), "backbone.layers.")


def _norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.vars.0", (f"{ours}.scale",)), Row(f"{theirs}.vars.1", (f"{ours}.shift",))]


def _matrix(theirs: str, ours: str) -> Row:
    return Row(f"{theirs}.vars.0", (f"{OURS}{ours}.weight",), MATRIX)


def _gpt2() -> list[Row]:
    block = "{prefix}transformer_decoder{_i}."
    attention = f"{block}_self_attention_layer."
    heads = {"h": "num_heads"}
    rows = [
        Row("{prefix}reversible_embedding.vars.0", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("{prefix}position_embedding.vars.0", ("pos_emb.weight",)),
        Row(f"{attention}output_dense.vars.0", (f"{OURS}att.out_proj.weight",), OUT_OF, sizes=heads),
        Row(f"{attention}output_dense.vars.1", (f"{OURS}att.out_proj.bias",)),
        *_norm(f"{block}_self_attention_layer_norm", f"{OURS}norm1"),
        *_norm(f"{block}_feedforward_layer_norm", f"{OURS}norm2"),
        *_norm("{prefix}layer_normalization", "final_norm"),
    ]
    for name in ("query", "key", "value"):
        stem, ours = f"{attention}{name}_dense.vars", f"{OURS}att.W_{name}"
        rows.append(Row(f"{stem}.0", (f"{ours}.weight",), INTO, sizes=heads))
        rows.append(Row(f"{stem}.1", (f"{ours}.bias",), "(h c) -> h c", sizes=heads))
    for number, name in ((0, "intermediate"), (2, "output")):
        rows.append(_matrix(f"{block}_feedforward_{name}_dense", f"ff.layers.{number}"))
        rows.append(Row(f"{block}_feedforward_{name}_dense.vars.1", (f"{OURS}ff.layers.{number}.bias",)))
    return rows


def _decoder(family: str, norm: str, *, biases: bool = False, qk_norm: bool = False) -> list[Row]:
    """Return the rows of Llama and its kin, whose classes begin with the name of the family."""
    block = f"{{prefix}}{family}_transformer_decoder{{_i}}."
    attention = f"{block}_self_attention_layer."
    rows = [
        Row("{prefix}reversible_embedding.vars.0", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("{prefix}reversible_embedding.vars.1", ("out_head.weight",), MATRIX, optional=True),
        Row(
            f"{attention}_output_dense.vars.0",
            (f"{OURS}att.out_proj.weight",),
            OUT_OF,
            sizes={"h": "num_heads"},
        ),
        Row(f"{block}_self_attention_layernorm.vars.0", (f"{OURS}norm1.scale",)),
        Row(f"{block}_feedforward_layernorm.vars.0", (f"{OURS}norm2.scale",)),
        _matrix(f"{block}_feedforward_gate_dense", "ff.fc1"),
        _matrix(f"{block}_feedforward_intermediate_dense", "ff.fc2"),
        _matrix(f"{block}_feedforward_output_dense", "ff.fc3"),
        Row(f"{{prefix}}{family}_{norm}.vars.0", ("final_norm.scale",)),
    ]
    for name in ("query", "key", "value"):
        stem, ours = f"{attention}_{name}_dense.vars", f"{OURS}att.W_{name}"
        heads = {"h": "num_heads" if name == "query" else "num_kv_heads"}
        rows.append(Row(f"{stem}.0", (f"{ours}.weight",), INTO, sizes=heads))
        if biases:
            rows.append(Row(f"{stem}.1", (f"{ours}.bias",), "(h c) -> h c", sizes=heads))
        if qk_norm and name != "value":
            theirs = f"{attention}_{name}_dense_layer_norm.vars.0"
            rows.append(Row(theirs, (f"{OURS}att.{name[0]}_norm.scale",)))
    return rows


def _layout(model_type: str, title: str, rows: list[Row], *backbones: str) -> Layout:
    return Layout(
        f"keras-{model_type}",
        f"KerasHub's {title}",
        rows,
        prefixes=_fronts(*backbones),
        settings={**TIE, **GROUPED_HEADS},
        defaults={"tie": 0},
        whole=True,
        model_types=(model_type,),
        parts=(OPTIMIZER,),
    )


LAYOUTS = (
    Layout(
        "keras-gpt2",
        "KerasHub's GPT-2",
        _gpt2(),
        prefixes=_fronts("gpt2_backbone"),
        settings=HEADS,
        defaults={"tie": 1},
        whole=True,
        model_types=("gpt2",),
        parts=(OPTIMIZER,),
    ),
    _layout("llama", "Llama, 2 and 3", _decoder("llama", "layer_norm"), "llama_backbone", "llama3_backbone"),
    _layout("mistral", "Mistral", _decoder("mistral", "layer_normalization"), "mistral_backbone"),
    _layout("qwen2", "Qwen 2", _decoder("qwen", "layer_norm", biases=True), "qwen_backbone"),
    _layout("qwen3", "Qwen 3", _decoder("qwen3", "layer_norm", qk_norm=True), "qwen3_backbone"),
)
