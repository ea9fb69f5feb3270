"""The layout of a described family: its table of tensors, and what files have next to the parameters.

That is copies, and buffers of older `transformers`. The derivation sees neither: `save_pretrained` of a current version
writes parameters alone, once. The published files of GPT-Neo, GPT-J, Pythia and RoBERTa are older.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ...weights.rows import Row
from ..layout import HEAD, Layout
from ..reading import multimodal
from ..rows.common import (
    FREQUENCIES,
    TIE,
    is_counted,
    is_hugely_negative,
    is_mask_of_window,
    is_sinusoids,
    is_zero,
)
from ..rows.decoder import (
    APART,
    EMBEDDINGS,
    FURTHER_LAYER,
    FURTHER_ROWS,
    FUSED,
    OURS,
    PREFIXES,
    TOGETHER,
    decoder,
)
from .description import Description, KeySource

_SETTINGS = {
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "num_attention_heads"),
    **{key: (key,) for key in ("kv_lora_rank", "qk_nope_head_dim")},
}
"""Settings that sizes in rows may be named after -> keys of a config.json that hold them."""

_TIED = KeySource(key="tie_word_embeddings")


def layout_of(description: Description) -> Layout:
    """Return the table of a described family's tensors; its rows hold them all where its prefixes are its own."""
    title = f"transformers {description.architecture.removesuffix('ForCausalLM')}"
    rows = (*description.rows, *rows_of_buffers(description.rows), *FURTHER_ROWS)
    sizes = {size for row in description.rows for size in (*row.sizes.values(), *row.split, *row.shares)}
    aliases = description.aliases
    # A file's own name of a key goes before the usual one, which the defaults have.
    settings = {
        name: tuple(
            other
            for usual in keys
            for key in (description.keys.get(usual, usual),)
            for other in (*aliases.get(key, ()), key)
        )
        for name, keys in _SETTINGS.items()
        if name in sizes
    }
    defaults: dict[str, int] = {}
    if {APART, TOGETHER} <= {row.branch for row in description.rows}:
        settings, defaults = {**settings, **FUSED}, {"fused": 0}
    of_experts = [row.theirs for row in description.rows if row.ours and ".experts." in row.ours[0]]
    # A file of a family whose experts have other names has these marks in none of its tensors.
    marks = (".experts.",) if of_experts and all(".experts." in name for name in of_experts) else ()
    # Without a key the head is never tied, whatever a config holds.
    tie = TIE if description.fields.get("model.tie", _TIED).key else {}
    is_whole = bool(description.prefixes)
    return decoder(
        description.layout,
        title,
        rows,
        prefixes=description.prefixes or PREFIXES,
        model_types=(multimodal.decoder_type(description.model_type),),
        embeddings=() if is_whole else EMBEDDINGS,
        tie=tie if is_whole else TIE,
        settings=settings,
        defaults=defaults,
        marks=marks,
        parts=(FURTHER_LAYER,),
    )


_MASK = "a causal mask or that of a window, which our modules compute"

_OF_ATTENTION = (
    Row("bias", reason=_MASK, check=is_mask_of_window),
    Row("causal_mask", reason=_MASK, check=is_mask_of_window),
    Row("masked_bias", reason="the number that masked scores are set to", check=is_hugely_negative),
    FREQUENCIES,
)
"""Buffers of a layer, below the prefix of its attention."""

_OF_EMBEDDINGS = (
    Row("position_ids", reason="the numbers from 0 on", check=is_counted),
    Row("token_type_ids", reason="zeros, the type of a token without another", check=is_zero),
)
"""Buffers next to a table of embeddings that has a module above it."""


_SINUSOIDS = Row("embed_positions.weight", reason="angles of rotary positions, which are computed", check=is_sinusoids)
"""A table next to the layers of RoFormer, which is frozen there."""


def rows_of_buffers(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return rows of the dropped tensors that files of a family may have, each checked against its reason.

    Args:
        rows: the family's rows of parameters, whose names none of them takes.
    """
    names = {row.theirs for row in rows}
    return tuple(row for row in (*_copies(rows, names), *_older(rows), *_tables(rows)) if row.theirs not in names)


def _copies(rows: tuple[Row, ...], names: set[str]) -> Iterator[Row]:
    """Yield the second name that BERT's kind of head gives its bias: ``decoder.bias`` next to ``bias``.

    A state_dict has both, a file of `save_pretrained` only the first.
    """
    for row in rows:
        above = row.theirs.removesuffix("decoder.weight")
        if row.ours == (HEAD,) and f"{above}bias" in names:
            yield Row(f"{above}decoder.bias", reason=f"a copy of {above}bias", copy_of=f"{above}bias")


def _older(rows: tuple[Row, ...]) -> Iterator[Row]:
    """Yield the buffers below every prefix of attention, and below that of the embeddings."""
    fronts = {
        _above(row.theirs): kinds
        for name, kinds in ((f"{OURS}att.W_query.weight", _OF_ATTENTION), ("tok_emb.weight", _OF_EMBEDDINGS))
        for row in rows
        if name in row.ours
    }
    for front, kinds in fronts.items():
        for row in kinds if front else ():
            yield dataclasses.replace(row, theirs=f"{front}{row.theirs}")


def _tables(rows: tuple[Row, ...]) -> Iterator[Row]:
    """Yield the table of sinusoids next to the layers of an encoder with BERT's names."""
    query = next((row.theirs for row in rows if row.ours == (f"{OURS}att.W_query.weight",)), "")
    if query.endswith("encoder.layer.{i}.attention.self.query.weight"):
        yield dataclasses.replace(_SINUSOIDS, theirs=query.partition("layer.{i}.")[0] + _SINUSOIDS.theirs)


def _above(name: str) -> str:
    """Return what precedes the names of a parameter and of its module: "" if that is the model's prefix alone."""
    front = ".".join(name.split(".")[:-2])
    return f"{front}." if front else ""
