"""Our own names, and what the Flax twins call the same tensors. Every other layout is said in terms of these."""

from __future__ import annotations

from .table import Row

MATRIX = "o i -> i o"

ATTENTION = [f"{{path}}{name}.{leaf}" for name in ("W_query", "W_key", "W_value") for leaf in ("weight", "bias")]
OUT = ["{path}out_proj.weight", "{path}out_proj.bias"]
BARE = ["{path}W_query", "{path}W_key", "{path}W_value"]
"""Matrices of `SelfAttention_v1`, which are [in, out] in both twins."""

LINEAR = [
    f"{{path}}{name}.{leaf}"
    for name in ("ff.layers.0", "ff.layers.2", "ff.fc1", "ff.fc2", "ff.fc3", "out_head")
    for leaf in ("weight", "bias")
]
EMBEDDINGS = ["{path}tok_emb.weight", "{path}pos_emb.weight", "{path}type_emb.weight"]
NORMS = ["{path}scale", "{path}shift"]

MODERN = [
    *(
        f"{{path}}{name}.{leaf}"
        for name in ("W_gate", "W_query_latent", "W_latent", "W_key_rope")
        for leaf in ("weight", "bias")
    ),
    *(f"{{path}}{name}" for name in ("sinks", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")),
]
"""What attention after chapter 3 has beside the others."""

NAMES = [*ATTENTION, *OUT, *BARE, *LINEAR, *EMBEDDINGS, *NORMS, *MODERN]
"""Every name of ours, below any prefix."""

TOGETHER = (("W_query.weight", "W_key.weight", "W_value.weight"), ("W_query.bias", "W_key.bias", "W_value.bias"))
"""Endings of which a module has all or none."""


def torch_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our torch names, those but for some."""
    skipped = {name for names in left_out for name in names}
    return [Row(name, (name,)) for name in NAMES if name not in skipped]


def flax_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our Flax names, those but for some."""
    skipped = {name for names in left_out for name in names}
    return [_flax_row(name) for name in NAMES if name not in skipped]


def _flax_row(name: str) -> Row:
    stem, _, leaf = name.rpartition(".")
    if name in EMBEDDINGS:
        return Row(f"{stem}.embedding", (name,))
    if leaf == "weight":
        return Row(f"{stem}.kernel", (name,), MATRIX)
    return Row(name, (name,))
