"""Rows of the short convolution in front of a delta rule: one tensor, or those of query, key and value."""

from __future__ import annotations

from ...weights.rows import Row
from .attention import Table

CONVOLUTION = Row("conv1d.weight", ("conv1d.weight",))
"""As `transformers` has it in memory: the channels of query, key and value."""

CONVOLUTIONS: Table = tuple(
    Row(
        f"{name}_conv1d.weight",
        ("conv1d.weight",),
        lengths=("W_query.weight", "W_key.weight", "W_value.weight"),
        piece=number,
        even="resaved",
    )
    for number, name in enumerate("qkv")
)
"""As files have it; `transformers` saves three equal parts, whatever the widths."""

CUT: dict[str, tuple[str, ...]] = {"joined": (), "resaved": ()}
"""Settings: whether it is one tensor, and whether names and parts are those that `transformers` saves."""
