"""Rows and settings that whole models of several kinds have in common."""

from __future__ import annotations

from ..weights.rows import Row

TIE = {"tie": ("tie_word_embeddings",)}
HEADS = {"num_heads": ("num_attention_heads", "n_head")}


def with_bias(theirs: str, ours: str, pattern: str = "... -> ...") -> list[Row]:
    """Return rows of a linear or convolution, whose weight may lie otherwise there."""
    return [Row(f"{theirs}.weight", (f"{ours}.weight",), pattern), Row(f"{theirs}.bias", (f"{ours}.bias",))]


def layer_norm(theirs: str, ours: str) -> list[Row]:
    """Return rows of a norm that scales and shifts."""
    return [Row(f"{theirs}.weight", (f"{ours}.scale",)), Row(f"{theirs}.bias", (f"{ours}.shift",))]
