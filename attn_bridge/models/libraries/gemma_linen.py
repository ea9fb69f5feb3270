"""Gemma 2 and 3 in DeepMind's package `gemma`, in Linen: the text models.

Names and shapes are those of ``gemma`` 3.3.0 (``gm/nn/_modules.py``, ``gm/nn/_transformer.py``), and of the flat names
of the published checkpoints, which it reads as well (``gm/ckpts/_compat.py``). Norms store the offset from 1 on both
sides, and rotary positions pair the same halves, so numbers only move.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from ...weights.placements import Shape
from ...weights.rows import Row
from ..layout import Settings
from ..parts import towers
from .chosen import ChosenLayout, Form

OURS = "trf_blocks.{i}."
FLAT = "transformer/"
"""Prefix of the names of published checkpoints, whose modules are joined by slashes."""

_NORMS = (
    ("pre_attention_norm", "norm1"),
    ("post_attention_norm", "post_norm1"),
    ("pre_ffw_norm", "norm2"),
    ("post_ffw_norm", "post_norm2"),
    ("attn._query_norm", "att.q_norm"),
    ("attn._key_norm", "att.k_norm"),
)


def _rows(form: Form) -> list[Row]:
    """Return the rows of models with a key and value head per query head (``fused``), or with shared ones."""
    front = FLAT if form["flat"] else "{prefix}"

    def named(path: str, leaf: str, *, bare: bool = False) -> str:
        path = f"{front}{path.replace('.', '/') if form['flat'] else path}"
        return path if bare and not form["flat"] else f"{path}.{leaf}"  # the feed-forward has no submodules

    def projections(theirs: str, *names: str) -> Row:
        ours = tuple(f"{OURS}att.W_{name}.weight" for name in names)
        several = len(names) > 1
        pattern = f"(n h) d -> {'part ' if several else ''}n d h"
        return Row(
            named(f"layer_{{i}}.attn.{theirs}", "w"),
            ours,
            pattern,
            part="part" if several else "",
            sizes={"h": "head_dim"},
        )

    gating = "h d -> part h d" if form["transposed"] else "h d -> part d h"
    return [
        Row(named("embedder", "input_embedding"), ("tok_emb.weight",), tied=("out_head.weight",)),
        *(
            [projections("qkv_einsum", "query", "key", "value")]
            if form["fused"]
            else [projections("q_einsum", "query"), projections("kv_einsum", "key", "value")]
        ),
        Row(
            named("layer_{i}.attn.attn_vec_einsum", "w"),
            (f"{OURS}att.out_proj.weight",),
            "d (n h) -> n h d",
            sizes={"h": "head_dim"},
        ),
        Row(
            named("layer_{i}.mlp.gating_einsum", "w", bare=True),
            (f"{OURS}ff.fc1.weight", f"{OURS}ff.fc2.weight"),
            gating,
            part="part",
        ),
        Row(named("layer_{i}.mlp.linear", "w", bare=True), (f"{OURS}ff.fc3.weight",), "d h -> h d"),
        *(
            Row(
                named(f"layer_{{i}}.{theirs}", "scale"),
                (f"{OURS}{ours}.scale",),
                optional=theirs.startswith("attn."),
            )
            for theirs, ours in _NORMS
        ),
        Row(named("final_norm", "scale"), ("final_norm.scale",)),
    ]


def _of_theirs(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form of a model of `gemma`; square feed-forward matrices alone don't determine the gate's axes."""
    votes = collections.Counter({settings["transposed"]: 0})
    for name, shape in shapes.items():
        stem, separator, rest = name.partition("gating_einsum")
        other = shapes.get(f"{stem}linear{rest}", ())
        if separator and len(shape) == 3 and len(other) == 2 and other[0] != other[1]:
            votes[int(tuple(shape[1:]) == tuple(other))] += 1
    transposed = votes.most_common(1)[0][0]  # of most layers: one that is wrong must not turn all others
    flat = int(any(name.startswith(FLAT) for name in shapes))
    return {"flat": flat, "transposed": transposed, "fused": any("qkv_einsum" in name for name in shapes)}


def _of_ours(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form that `gemma` gives a model: one projection if keys have as many heads as queries."""
    pairs = [
        (shape, shapes.get(name.replace("W_query", "W_key")))
        for name, shape in shapes.items()
        if name.endswith("att.W_query.weight")
    ]
    fused = bool(pairs) and all(key is not None and tuple(query) == tuple(key) for query, key in pairs)
    return {"flat": settings["flat"], "transposed": settings["transposed"], "fused": fused}


def _form(*, flat: int, fused: bool) -> Form:
    return {"flat": flat, "transposed": 1, "fused": fused}


_FRONTS = ("", "params.", "transformer.", "params.transformer.")

LAYOUT = ChosenLayout(
    "gemma-linen",
    "DeepMind's gemma package (Linen), Gemma 2 and 3, of Gemma 3 the text model",
    _rows,
    usual=_form(flat=0, fused=False),
    forms=[_form(flat=flat, fused=fused) for flat in (0, 1) for fused in (False, True)],
    of_theirs=_of_theirs,
    of_ours=_of_ours,
    kept=("flat", "transposed"),
    prefixes=_FRONTS,
    settings={"head_dim": ("head_dim",), "transposed": (), "flat": ()},
    defaults={"tie": 1, "transposed": 1, "flat": 0},
    whole=True,
    parts=(
        *towers("vision_encoder.", "embedder.mm_", "embedder.audio_", fronts=_FRONTS),
        *towers("SigLiPFromPatches_0/", "transformer/embedder.mm_", fronts=("",)),
    ),
    refused={
        "transformer/stacked_layers/{rest}": "layers stacked by kind of attention; load them with gemma's "
        "gm.ckpts.load_params, which takes them apart, and save that",
    },
)
