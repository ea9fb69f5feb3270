"""Weights that cross between torch and Flax: one rule per tensor, both directions derived from it."""

from .lazy import LazyArray, Region, everything, overlap, slices
from .rule import Rule, Side, rule_from
from .rules import Arrays, Rules, WeightsMismatchError, as_rules, convert_pairs, flax_to_torch, torch_to_flax

__all__ = [
    "Arrays",
    "LazyArray",
    "Region",
    "Rule",
    "Rules",
    "Side",
    "WeightsMismatchError",
    "as_rules",
    "convert_pairs",
    "everything",
    "flax_to_torch",
    "overlap",
    "rule_from",
    "slices",
    "torch_to_flax",
]
