"""Whether a pair can be asked what other numbers give, and which of its sides devices share."""

from __future__ import annotations

from collections.abc import Mapping

from ...pair import SIDES, Pair
from ...results.findings import Side
from ...sides.subject import Run


def is_askable(pair: Pair) -> bool:
    """Tell whether running a pair again, in float64 and with other numbers, is quick and says something."""
    return not (pair.lacks or pair.effort.large or pair.train)


def shared_side(runs: Mapping[Side, Run]) -> Side | None:
    """Return the side whose results devices share; None if neither's."""
    return next((side for side in SIDES if runs[side].shares.any_cut), None)


def other_side(side: Side) -> Side:
    """Return the other one."""
    return "second" if side == "first" else "first"
