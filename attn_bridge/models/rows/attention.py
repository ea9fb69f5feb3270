"""Rows of attention in other libraries' names, below the prefix of one layer; whole models and families share them.

Where a size may be a number or the name of a setting, a family gives the number and a whole model the name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ...weights.rows import Row
from .common import is_frequencies

Table = tuple[Row, ...]
Size = int | str

PROJECTIONS = (("q_proj", "W_query"), ("k_proj", "W_key"), ("v_proj", "W_value"), ("o_proj", "out_proj"))

FREQUENCIES = Row("rotary_emb.inv_freq", reason="rotary frequencies, which are computed", check=is_frequencies)
"""Present in files of before 2023."""

SPLIT: Table = (
    *(
        Row(f"{theirs}.{leaf}", (f"{ours}.{leaf}",), optional=leaf == "bias")
        for theirs, ours in PROJECTIONS
        for leaf in ("weight", "bias")
    ),
    *(Row(f"{name}_norm.weight", (f"{name}_norm.scale",), optional=True) for name in ("q", "k")),
    FREQUENCIES,
)
"""The names of Llama, which most models share."""

SINKS = Row("sinks", ("sinks",))

OPENAI: Table = (
    *(
        Row(f"qkv.{leaf}", tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value")), "o ... -> o ...", along="o")
        for leaf in ("weight", "bias")
    ),
    Row("out.weight", ("out_proj.weight",)),
    Row("out.bias", ("out_proj.bias",)),
    SINKS,
    Row("norm.scale", reason="the norm before attention"),
)
"""gpt-oss in OpenAI's own files, below ``block.0.attn.``: query, key and value are concatenated."""

ENCODER_DECODER: Table = tuple(
    Row(f"{theirs}.{leaf}", (f"{ours}.{leaf}",), optional=(theirs, leaf) == ("k_proj", "bias"))
    for theirs, ours in (*PROJECTIONS[:3], ("out_proj", "out_proj"))
    for leaf in ("weight", "bias")
)
"""BART and Whisper, whose keys have no bias."""


def interleaved_rotary(num_heads: Size, num_kv_heads: Size) -> Table:
    """Return the table of Meta's and Mistral's own files, with interleaved rotary positions.

    Channel ``i`` of either half of a head is theirs at ``2 i`` and ``2 i + 1``.
    """
    pattern = "(h pair c) i -> (h c pair) i"
    return (
        Row("wq.weight", ("W_query.weight",), pattern, sizes={"h": num_heads, "pair": 2}),
        Row("wk.weight", ("W_key.weight",), pattern, sizes={"h": num_kv_heads, "pair": 2}),
        Row("wv.weight", ("W_value.weight",)),
        Row("wo.weight", ("out_proj.weight",)),
        FREQUENCIES,
    )


QUERY: Table = (Row("q_proj.weight", ("W_query.weight",)),)
"""Queries of DeepSeek projected from the input itself."""

QUERY_LATENT: Table = (
    Row("q_a_proj.weight", ("W_query_latent.weight",)),
    Row("q_a_proj.bias", ("W_query_latent.bias",), optional=True),
    Row("q_a_layernorm.weight", ("query_norm.scale",)),
    Row("q_b_proj.weight", ("W_query.weight",)),
)
"""Queries of DeepSeek projected from a latent."""


def latent(num_heads: Size, latent_dim: Size, nope_dim: Size) -> Table:
    """Return the table of DeepSeek without its queries.

    The latent and the rotary key share one projection; the projections from the latent to keys and values share
    another, interleaved by head.
    """
    split = (latent_dim, "...")
    return (
        Row(
            "kv_a_proj_with_mqa.weight", ("W_latent.weight", "W_key_rope.weight"), "o i -> o i", along="o", split=split
        ),
        Row(
            "kv_a_proj_with_mqa.bias",
            ("W_latent.bias", "W_key_rope.bias"),
            "o -> o",
            along="o",
            split=split,
            optional=True,
        ),
        Row("kv_a_layernorm.weight", ("latent_norm.scale",)),
        Row(
            "kv_b_proj.weight",
            ("W_key.weight", "W_value.weight"),
            "(h c) i -> (h c) i",
            along="c",
            split=(nope_dim, "..."),
            sizes={"h": num_heads},
        ),
        Row("o_proj.weight", ("out_proj.weight",)),
        Row("o_proj.bias", ("out_proj.bias",), optional=True),
        FREQUENCIES,
    )


def below(
    rows: Iterable[Row], theirs: str, ours: str, *, required: tuple[str, ...] = (), branch: str = ""
) -> list[Row]:
    """Return rows with prefixes added to the names on both sides.

    Args:
        rows: the rows.
        theirs: prefix of the outside names.
        ours: prefix of ours.
        required: prefixes of names of optional rows that are required here.
        branch: their `branch`.
    """
    return [
        dataclasses.replace(
            row,
            theirs=theirs + row.theirs,
            ours=tuple(ours + name for name in row.ours),
            lengths=tuple(ours + name for name in row.lengths),
            optional=row.optional and not row.theirs.startswith(required),
            branch=branch,
        )
        for row in rows
    ]
