"""Rows of attention in other libraries' names, below the prefix of one layer; whole models and families share them."""

from __future__ import annotations

from ...weights.rows import Row
from .common import is_frequencies

Table = tuple[Row, ...]

FREQUENCIES = Row("rotary_emb.inv_freq", reason="rotary frequencies, which are computed", check=is_frequencies)
"""Present in files of before 2023."""

ENCODER_DECODER: Table = tuple(
    Row(f"{theirs}.{leaf}", (f"{ours}.{leaf}",), optional=(theirs, leaf) == ("k_proj", "bias"))
    for theirs, ours in (("q_proj", "W_query"), ("k_proj", "W_key"), ("v_proj", "W_value"), ("out_proj", "out_proj"))
    for leaf in ("weight", "bias")
)
"""BART and Whisper, whose keys have no bias."""
