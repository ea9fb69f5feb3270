"""Attention whose keys and values are made of a latent: the roles of its modules, its rows, and its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from attn_bridge.models.derived.description import KeySource
from attn_bridge.models.rows.common import is_frequencies
from attn_bridge.models.rows.decoder import LAYER
from attn_bridge.models.tables import table
from attn_bridge.weights.rows import Row

from .model_class import DerivationError, ModelClass

ROLES = {
    "W_query": ("q_proj", "q_b_proj"),
    "query_latent": ("q_a_proj",),
    "query_norm": ("q_a_layernorm",),
    "latent": ("kv_a_proj_with_mqa",),
    "latent_norm": ("kv_a_layernorm",),
    "key_value": ("kv_b_proj",),
    "out_proj": ("o_proj",),
}
"""Our role -> names that modules of published models have for it."""

BIASED = ("query_latent", "latent", "out_proj")
"""Roles that may have a bias."""

FIELDS = {
    "latent_dim": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "query_dim": "q_lora_rank",
}
"""Our name of a width -> its key."""

SHARED = "v_head_dim"
"""Key of a width that is the heads' share of the model's where a config has none (MiniCPM 3)."""

DIRECT, THROUGH = "queries/direct", "queries/latent"
"""Branches of the rows of queries: projected from the input itself, or from a latent."""

FRONT, INDEXER = f"{LAYER}self_attn.", ".indexer."
"""Beginning of the names of such attention in the table of DeepSeek, and a module of it that other models lack."""


def is_in(block: nn.Module) -> bool:
    """Return whether a block has such attention."""
    return any(name in ROLES["latent"] for child in block.children() for name, _ in child.named_children())


def may_be_direct(subject: ModelClass, attention: str) -> bool:
    """Return whether a config without a latent of queries gives a projection from the input itself."""
    try:
        names = subject.shapes(subject.keys(**{FIELDS["query_dim"]: None}))
    except Exception:  # a class that always has the latent fails in its own way, which is an answer
        return False
    return any(name.endswith(f".{attention}.{ROLES['W_query'][0]}.weight") for name in names)


def rows(layer: str, roles: Mapping[str, str], *, has_direct: bool, has_bias: bool) -> Iterator[Row]:
    """Yield the rows of the attention of a layer.

    Args:
        layer: prefix of their names.
        roles: role -> name of a submodule, as in the usual instance.
        has_direct: whether queries may be projected from the input itself.
        has_bias: whether projections may have biases.

    Raises:
        DerivationError: an instance without a latent of queries, whose width a config must have.
    """
    if "query_latent" not in roles:
        raise DerivationError(f"{layer.rstrip('.')}: no {FIELDS['query_dim']} that gives queries a latent")
    branches = (THROUGH, DIRECT, "") if has_direct else (THROUGH, "")
    every = [row for row in table("hf-deepseek").rows if row.theirs.startswith(FRONT) and INDEXER not in row.theirs]
    for branch in branches:
        for row in every:
            if row.branch == branch and row.check is not is_frequencies and (has_bias or "bias" not in row.theirs):
                name = layer + row.theirs.removeprefix(FRONT)
                yield dataclasses.replace(row, theirs=name, branch=branch if has_direct else "")


def fields(subject: ModelClass) -> dict[str, KeySource]:
    """Return the fields of the widths.

    Raises:
        DerivationError: a config lacks a key of them.
    """
    lacking = [key for key in FIELDS.values() if key not in subject.sizes]
    if lacking:
        raise DerivationError(f"{lacking[0]}: no such width in the config; the nearest is {FIELDS['latent_dim']}")
    defaults = subject.defaults
    return {
        f"attention.{field}": KeySource(
            key=subject.canonical(key), share="num_attention_heads" if key == SHARED and defaults[key] is None else ""
        )
        for field, key in FIELDS.items()
    }
