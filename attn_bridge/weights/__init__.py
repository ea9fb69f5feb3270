"""Weights that cross between torch and Flax: one rule per tensor, both directions derived from it."""

from .rule import Rule, Side, rule_from
from .rules import Arrays, Rules, WeightsMismatchError, as_rules, convert_pairs, flax_to_torch, torch_to_flax

__all__ = [
    "Arrays",
    "Rule",
    "Rules",
    "Side",
    "WeightsMismatchError",
    "as_rules",
    "convert_pairs",
    "flax_to_torch",
    "rule_from",
    "torch_to_flax",
]
