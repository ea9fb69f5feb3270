"""Layouts of single attention modules, alone or in a model: ours, the book's, fused ones, the frameworks'."""

from __future__ import annotations

import dataclasses

from ..weights.rows import Row
from . import ours
from .layout import Layout
from .rows.common import is_inverted_causal_mask

MASK = Row("{path}mask", reason="a causal mask, which our modules compute", check=is_inverted_causal_mask)
PROJECTIONS = ("query", "key", "value")


def _thirds(leaf: str) -> tuple[str, ...]:
    return tuple(f"{{path}}W_{name}.{leaf}" for name in PROJECTIONS)


def _fused(stem: str) -> list[Row]:
    return [
        Row(f"{{path}}{stem}weight", _thirds("weight"), "o i -> (part o) i", part="part"),
        Row(f"{{path}}{stem}bias", _thirds("bias"), "o -> (part o)", part="part", optional=True),
    ]


def _by_heads() -> list[Row]:
    heads = {"h": "num_heads"}
    rows = [
        row
        for name in PROJECTIONS
        for row in (
            Row(f"{{path}}{name}.kernel", (f"{{path}}W_{name}.weight",), "(h c) d -> d h c", sizes=heads),
            Row(f"{{path}}{name}.bias", (f"{{path}}W_{name}.bias",), "(h c) -> h c", sizes=heads, optional=True),
        )
    ]
    return [
        *rows,
        Row("{path}out.kernel", (ours.OUT[0],), "d (h c) -> h c d", sizes=heads),
        Row("{path}out.bias", (ours.OUT[1],), optional=True),
        *ours.flax_rows(ours.ATTENTION, ours.OUT),
    ]


HEADS = {"num_heads": ("num_heads", "num_attention_heads", "n_head", "n_heads")}

LAYOUTS = [
    Layout("torch", "the torch twins", ours.torch_rows()),
    Layout("flax", "the Flax twins", ours.flax_rows(), nnx=True),
    Layout("book", "the book's checkpoints, with their mask buffers", [*ours.torch_rows(), MASK]),
    Layout(
        "fused-qkv",
        "q, k and v in one matrix, as the book's bonus material has them",
        [
            *_fused("qkv."),
            Row("{path}proj.weight", (ours.OUT[0],)),
            Row("{path}proj.bias", (ours.OUT[1],), optional=True),
            *ours.torch_rows(ours.ATTENTION, ours.OUT),
            MASK,
        ],
    ),
    Layout(
        "torch-mha",
        "torch.nn.MultiheadAttention",
        [*_fused("in_proj_"), *ours.torch_rows(ours.ATTENTION)],
    ),
    Layout("nnx-mha", "flax.nnx.MultiHeadAttention", _by_heads(), settings=HEADS, nnx=True),
    Layout(
        "linen-mha",
        "flax.linen.MultiHeadDotProductAttention",
        [dataclasses.replace(row, theirs="{prefix}" + row.theirs) for row in _by_heads()],
        prefixes=("params.", ""),
        settings=HEADS,
    ),
]
