"""What a comparison could not see: parameters without a gradient, and branches it did not reach."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from . import samples as numbers
from .judgement import SIDES
from .report import TensorVerdict
from .submodule_pairs import differing_settings

if TYPE_CHECKING:
    from .pair import Comparison

MOST_PROBES = 200
"""Most parameters without a gradient that are told apart: used or not, an invariance or not."""


def settle(
    comparison: Comparison, tensors: list[TensorVerdict], zero: list[str]
) -> tuple[list[TensorVerdict], dict[str, list[str]]]:
    """Tell true invariances from parameters that nothing reached, among those whose gradient is zero."""
    if comparison.large:
        return tensors, _settle_large(comparison, zero)
    invariances, unexercised, unused = [], [], {}
    drawn = numbers.draw_weights(comparison.torch.parameters(), comparison.held, (0, 2))
    known = {match.torch.name: match for match in comparison.pairing.matches}
    matches = {name: known[name] for name in zero[:MOST_PROBES]}
    before = {side: comparison.changed(side, drawn, [], 0.0) for side in SIDES} if matches else {}
    still = not any(comparison.reaches(side, before, drawn, list(matches.values()), 1.0) for side in before)
    for name, match in matches.items():
        reached = {side: comparison.reaches(side, before, drawn, [match], np.nan) for side in SIDES}
        if all(reached.values()):
            if still or not any(comparison.reaches(side, before, drawn, [match], 1.0) for side in SIDES):
                invariances.append(name)
            else:
                comparison.notes.append(f"{name}: the output depends on it, but its gradient is zero on both sides")
        elif any(reached.values()):
            unused[name] = next(side for side, used in reached.items() if not used)
        else:
            unexercised.append(name)
    changed = []
    for one in tensors:
        name = one.name.removeprefix("grad ")
        if one.name.startswith("grad ") and name in unused:
            side = unused[name]
            one = dataclasses.replace(
                one, verdict="different", message=f"the {side} side has this parameter and does not use it"
            )
        changed.append(one)
    comparison.notes += differing_settings(comparison)
    unreached = _unreached(comparison)
    return changed, {"invariances": invariances, "unexercised": unexercised, "unreached": unreached}


def _settle_large(comparison: Comparison, zero: list[str]) -> dict[str, list[str]]:
    """Do the same with one run of one side: all parameters without a gradient change at once."""
    known = {match.torch.name: match for match in comparison.pairing.matches}
    matches = [known[name] for name in zero]
    moved = (
        bool(matches)
        and bool(comparison.before)
        and comparison.reaches("torch", comparison.before, comparison.held, matches, 1.0)
    )
    if moved:
        comparison.notes.append(f"{', '.join(zero)}: the output depends on some of them, but their gradient is zero")
    comparison.notes += differing_settings(comparison)
    unreached = _unreached(comparison)
    return {"invariances": [] if moved else zero, "unexercised": [], "unreached": unreached}


def _unreached(comparison: Comparison) -> list[str]:
    """Describe the branches that the call does not reach, on both sides."""
    return [
        *comparison.torch.unreached(comparison.arguments),
        *comparison.flax.unreached(comparison.flax_arguments),
    ]
