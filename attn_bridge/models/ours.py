"""Our torch names, and the Flax twins' names of the same tensors. Every other layout is defined in terms of these."""

from __future__ import annotations

from ..weights.rows import Row
from . import dimensions

OWN = "attn-bridge-"
"""Prefix of the model's name in the ``model_type`` of our config.json."""

ATTENTION = [f"{{path}}{name}.{leaf}" for name in ("W_query", "W_key", "W_value") for leaf in ("weight", "bias")]
OUT = ["{path}out_proj.weight", "{path}out_proj.bias"]

NAMES = {f"{{path}}{name}": len(axes) for name, axes in dimensions.names().items()}
NAMES |= {"{path}scale": 1, "{path}shift": 1}
"""Every name of ours, below any prefix -> its number of axes."""


def torch_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our torch names, without those left out."""
    skipped = {name for names in left_out for name in names}
    return [Row(name, (name,)) for name in NAMES if name not in skipped]


def flax_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our Flax names, without those left out."""
    skipped = {name for names in left_out for name in names}
    return [_flax_row(name, axes) for name, axes in NAMES.items() if name not in skipped]


def _flax_row(name: str, axes: int) -> Row:
    stem, _, leaf = name.rpartition(".")
    if name.endswith("_emb.weight"):
        return Row(f"{stem}.embedding", (name,))
    if leaf == "weight":
        return Row(f"{stem}.kernel", (name,), "o i k -> k i o" if axes == 3 else "o i -> i o")
    return Row(name, (name,))
