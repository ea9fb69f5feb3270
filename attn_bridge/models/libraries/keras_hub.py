"""Backbones of KerasHub, by the paths that their weights have in files of Keras, joined by dots.

Keras numbers layers of a class from none: ``transformer_decoder``, ``transformer_decoder_1``. Kernels of projections
keep heads apart, and a layer's kernel and bias are its ``vars.0`` and ``vars.1``. Read off KerasHub 0.32.
"""

from __future__ import annotations

from ...weights.rows import Row
from ..layout import Layout
from ..ours import MATRIX
from ..parts import OmittedPart
from ..rows.common import GROUPED_HEADS, HEADS, TIE

OURS = "trf_blocks.{i}."

OPTIMIZER = OmittedPart("optimizer.", "it is the state of an optimizer, which is no part of the model")

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


def _gemma(family: str, norms: dict[str, str], *, qk_norm: bool = False) -> list[Row]:
    """Return the rows of a Gemma, whose kernels into heads have the heads first.

    Args:
        family: with which the names of its classes begin.
        norms: name of a norm of a block -> our name.
        qk_norm: whether queries and keys have norms.
    """
    block = f"{{prefix}}{family}_decoder_block{{_i}}."
    rows = [
        Row("{prefix}reversible_embedding.vars.0", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row(f"{block}attention.output_dense.vars.0", (f"{OURS}att.out_proj.weight",), OUT_OF, sizes={"h": "num_heads"}),
        *(Row(f"{block}{theirs}.vars.0", (f"{OURS}{ours}.scale",)) for theirs, ours in norms.items()),
        _matrix(f"{block}gating_ffw", "ff.fc1"),
        _matrix(f"{block}gating_ffw_2", "ff.fc2"),
        _matrix(f"{block}ffw_linear", "ff.fc3"),
        Row("{prefix}rms_normalization.vars.0", ("final_norm.scale",)),
    ]
    for name in ("query", "key", "value"):
        stem, heads = f"{block}attention.{name}", {"h": "num_heads" if name == "query" else "num_kv_heads"}
        rows.append(Row(f"{stem}_dense.vars.0", (f"{OURS}att.W_{name}.weight",), "(h c) i -> h i c", sizes=heads))
        if qk_norm and name != "value":
            rows.append(Row(f"{stem}_norm.vars.0", (f"{OURS}att.{name[0]}_norm.scale",)))
    return rows


def _bert() -> list[Row]:
    block, ours = "{prefix}transformer_encoder{_i}.", "layers.{i}."
    attention, heads = f"{block}_self_attention_layer.", {"h": "num_heads"}
    tables = (("reversible_embedding", "tok"), ("position_embedding", "pos"), ("embedding", "type"))
    rows = [
        *(Row(f"{{prefix}}{theirs}.vars.0", (f"{name}_emb.weight",)) for theirs, name in tables),
        *_norm("{prefix}layer_normalization", "emb_norm"),
        Row(f"{attention}output_dense.vars.0", (f"{ours}att.out_proj.weight",), OUT_OF, sizes=heads),
        Row(f"{attention}output_dense.vars.1", (f"{ours}att.out_proj.bias",)),
        *_norm(f"{block}_self_attention_layer_norm", f"{ours}norm1"),
        *_norm(f"{block}_feedforward_layer_norm", f"{ours}norm2"),
        *(Row(f"{{prefix}}dense.vars.{one}", reason="the pooler is no part of the encoder") for one in (0, 1)),
    ]
    for name in ("query", "key", "value"):
        stem, own = f"{attention}{name}_dense.vars", f"{ours}att.W_{name}"
        rows.append(Row(f"{stem}.0", (f"{own}.weight",), INTO, sizes=heads))
        rows.append(Row(f"{stem}.1", (f"{own}.bias",), "(h c) -> h c", sizes=heads))
    for number, name in ((0, "intermediate"), (2, "output")):
        stem, own = f"{block}_feedforward_{name}_dense.vars", f"{ours}ff.layers.{number}"
        rows += [Row(f"{stem}.0", (f"{own}.weight",), MATRIX), Row(f"{stem}.1", (f"{own}.bias",))]
    return rows


FIRST_NORMS = {"pre_attention_norm": "norm1", "pre_ffw_norm": "norm2"}
ALL_NORMS = {**FIRST_NORMS, "post_attention_norm": "post_norm1", "post_ffw_norm": "post_norm2"}
"""Name of a norm of a block of Gemma 1, and of Gemma 2 and 3 -> our name."""


def _layout(model_type: str, title: str, rows: list[Row], *backbones: str, tie: int = 0, also: str = "") -> Layout:
    return Layout(
        f"keras-{model_type}",
        f"KerasHub's {title}",
        rows,
        prefixes=_fronts(*backbones),
        settings={**TIE, **GROUPED_HEADS},
        defaults={"tie": tie},
        whole=True,
        model_types=(model_type, *([also] if also else [])),
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
    _layout("gemma", "Gemma 1", _gemma("gemma", FIRST_NORMS), "gemma_backbone", tie=1),
    _layout("gemma2", "Gemma 2", _gemma("gemma", ALL_NORMS), "gemma_backbone", tie=1),
    _layout(
        "gemma3",
        "Gemma 3, the text model",
        _gemma("gemma3", ALL_NORMS, qk_norm=True),
        "gemma3_backbone",
        tie=1,
        also="gemma3_text",
    ),
    Layout(
        "keras-bert",
        "KerasHub's BERT",
        _bert(),
        prefixes=_fronts("bert_backbone"),
        settings=HEADS,
        whole=True,
        model_types=("bert",),
        parts=(OPTIMIZER,),
    ),
)
