"""The Flax models of `transformers` 4 (``flax_model.msgpack``), whose names follow from those of its torch models.

A Linear's weight is a kernel with its axes swapped, that of embeddings is ``embedding``, that of a LayerNorm ``scale``.
RMSNorms of Llama and T5 have a ``weight``, and GPT-2's Conv1D holds (outputs, inputs), which torch's does not.
"""

from __future__ import annotations

import dataclasses
import re

from ...weights.rows import Row
from ..handwritten import bert, encoder_decoder, gpt2, llama, t5
from ..layout import Layout

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


def _of(layout: Layout, name: str, title: str, model_types: tuple[str, ...], norm: str = "scale") -> Layout:
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


LAYOUTS = (
    _of(gpt2.LAYOUT, "flax-gpt2", "the Flax GPT-2 of transformers 4", ("gpt2",)),
    _of(bert.LAYOUT, "flax-bert", "the Flax BERT of transformers 4", ("bert",)),
    _of(llama.LAYOUT, "flax-llama", "the Flax Llama and Mistral of transformers 4", ("llama", "mistral"), "weight"),
    _of(encoder_decoder.LAYOUTS[0], "flax-bart", "the Flax BART of transformers 4", ("bart",)),
    _of(t5.LAYOUTS[0], "flax-t5", "the Flax T5 and mT5 of transformers 4", ("t5", "mt5"), "weight"),
)
