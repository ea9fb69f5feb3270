"""What a comparison could not see: parameters without a gradient, and branches it did not reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..pair import SIDES, Pair
from ..pairing import Match
from ..results.findings import TensorVerdict
from .runner import Outputs, Runner

MAX_PROBES = 200
"""Most parameters without a gradient that are told apart: used or not, an invariance or not."""


@dataclasses.dataclass
class Coverage:
    """What was not seen.

    Attributes:
        invariances: parameters that the outputs do not depend on although they are used.
        unexercised: parameters that nothing reached.
        unused: parameters that one side has and does not use -> the label of that side.
        unreached: branches that were not run.
        notes: what a reader has to know.
    """

    invariances: list[str] = dataclasses.field(default_factory=list)
    unexercised: list[str] = dataclasses.field(default_factory=list)
    unused: dict[str, str] = dataclasses.field(default_factory=dict)
    unreached: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def applied(self, tensors: Sequence[TensorVerdict]) -> list[TensorVerdict]:
        """Return the verdicts with those of parameters that one side does not use made ``different``."""
        found = []
        for one in tensors:
            label = self.unused.get(one.name.removeprefix("grad ")) if one.name.startswith("grad ") else None
            if label is not None:
                message = f"the {label} side has this parameter and does not use it"
                one = dataclasses.replace(one, verdict="different", message=message)
            found.append(one)
        return found


def covered(runner: Runner, zero: Sequence[str], held: Outputs) -> Coverage:
    """Tell true invariances from parameters that nothing reached, among those whose gradient is zero.

    Args:
        runner: what runs the pair.
        zero: parameters whose gradient was zero in every sample.
        held: outputs of a large pair on its own weights.
    """
    pair, found = runner.pair, Coverage()
    known = {match.first.name: match for match in pair.pairing.matches}
    if pair.effort.large:
        _cover_large(runner, [known[name] for name in zero], held, found)
    else:
        _cover(runner, {name: known[name] for name in zero[:MAX_PROBES]}, found)
    found.unreached = _unreached(pair)
    return found


def _cover(runner: Runner, matches: dict[str, Match], found: Coverage) -> None:
    if not matches:
        return
    before = {side: runner.changed(side, [], 0.0) for side in SIDES}
    still = not any(runner.reaches(side, before, list(matches.values()), 1.0) for side in SIDES)
    for name, match in matches.items():
        reached = {side: runner.reaches(side, before, [match], np.nan) for side in SIDES}
        if all(reached.values()):
            if still or not any(runner.reaches(side, before, [match], 1.0) for side in SIDES):
                found.invariances.append(name)
            else:
                found.notes.append(f"{name}: the output depends on it, but its gradient is zero on both sides")
        elif any(reached.values()):
            idle = next(side for side, used in reached.items() if not used)
            found.unused[name] = runner.pair.labels[idle]
        else:
            found.unexercised.append(name)


def _cover_large(runner: Runner, matches: list[Match], held: Outputs, found: Coverage) -> None:
    """Do the same with one run of one side: all parameters without a gradient change at once."""
    names = [match.first.name for match in matches]
    if matches and held and runner.reaches("first", held, matches, 1.0):
        found.notes.append(f"{', '.join(names)}: the output depends on some of them, but their gradient is zero")
    else:
        found.invariances = names


def _unreached(pair: Pair) -> list[str]:
    """Describe the branches that the call does not reach, on both sides."""
    return [line for side in SIDES for line in pair.subject(side).unreached(pair.arguments[side])]
