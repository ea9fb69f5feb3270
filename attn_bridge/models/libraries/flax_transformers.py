"""The Flax models of `transformers` 4 (``flax_model.msgpack``), whose names follow from those of its torch models.

A Linear's weight is a kernel with its axes swapped, that of embeddings is ``embedding``, that of a LayerNorm ``scale``.
RMSNorms of Llama and T5 have a ``weight``, and GPT-2's Conv1D holds (outputs, inputs), which torch's does not.
"""

from __future__ import annotations

import dataclasses
import re

from ...weights.rows import Row
from ..layout import Layout
from ..tables import table

WEIGHT = ".weight"
TABLES = ("_emb.weight", ".relative_bias")
"""Endings of our names of tables."""


def _row(row: Row, norm: str) -> Row:
    """Return the row of a Flax model for one of a torch model."""
    if not row.theirs.endswith(WEIGHT):
        return row
    stem = row.theirs.removesuffix(WEIGHT)
    ours = row.ours[0] if row.ours else ""
    if ours.endswith(TABLES):
        return dataclasses.replace(row, theirs=f"{stem}.embedding")
    if ours.endswith(".scale"):
        return dataclasses.replace(row, theirs=f"{stem}.{norm}")
    return dataclasses.replace(row, theirs=f"{stem}.kernel", pattern=_swapped(row.pattern) if ours else row.pattern)


def _swapped(pattern: str) -> str:
    """Return the pattern of a matrix whose two axes outside are swapped."""
    if pattern == "... -> ...":
        return "o i -> i o"
    left, right = pattern.split(" -> ")
    first, second = re.findall(r"\([^)]*\)|\S+", right)
    return f"{left} -> {second} {first}"


def _of(layout: Layout, name: str, title: str, model_types: tuple[str, ...], norm: str) -> Layout:
    return Layout(
        name,
        title,
        [_row(row, norm) for row in layout.rows],
        prefixes=layout.prefixes[:2],
        settings=layout.settings,
        defaults=layout.defaults,
        whole=True,
        model_types=model_types,
    )


LAYOUTS = tuple(
    _of(table(f"hf-{name}"), f"flax-{name}", f"the Flax {title} of transformers 4", model_types, norm)
    for name, title, model_types, norm in (
        ("gpt2", "GPT-2", ("gpt2",), "scale"),
        ("bert", "BERT", ("bert",), "scale"),
        ("llama", "Llama and Mistral", ("llama", "mistral"), "weight"),
        ("bart", "BART", ("bart",), "scale"),
        ("t5", "T5 and mT5", ("t5", "mt5"), "weight"),
    )
)
