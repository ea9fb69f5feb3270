"""Which parameter of one side is which of the other: a bijection, proposed from names, shapes and classes, or by rules.

Comes in: the parameters of both sides, rules, and a probe that runs both. Goes out: a `Pairing`. It runs nothing
itself, and knows no framework beyond the names of its layers.
"""

from __future__ import annotations

from .leftovers import Suited, UnpairedError, folding, rule_of, rules_for, suited
from .proposal import propose
from .rules import from_rules, pair_parameters, partial
from .settling import AGREE, MAX_CANDIDATES, Distance, Partial
from .tensors import Cut, Match, Pairing, Tensor, lies_within, uncovered, whole

__all__ = [
    "AGREE",
    "MAX_CANDIDATES",
    "Cut",
    "Distance",
    "Match",
    "Pairing",
    "Partial",
    "Suited",
    "Tensor",
    "UnpairedError",
    "folding",
    "from_rules",
    "lies_within",
    "pair_parameters",
    "partial",
    "propose",
    "rule_of",
    "rules_for",
    "suited",
    "uncovered",
    "whole",
]
