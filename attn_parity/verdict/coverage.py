"""What a comparison could not see: parameters without a gradient, and branches it did not reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ..pair import SIDES, Pair
from ..pairing import Match
from ..results.findings import TensorVerdict
from ..samples import inputs as calls
from ..sides.dtypes import is_float
from .bench import Findings
from .runner import Outputs, Runner

MAX_PROBES = 200
"""Most parameters without a gradient that are told apart: used or not, an invariance or not."""


@dataclasses.dataclass
class Coverage:
    """What was not seen.

    Attributes:
        invariances: parameters that the outputs do not depend on although they are used.
        unexercised: parameters that nothing reached.
        unused: parameters that one side has and does not use -> what messages call that side.
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


def covered(runner: Runner, findings: Findings) -> Coverage:
    """Tell what a comparison did not see; among parameters without a gradient, invariances from unreached ones.

    Args:
        runner: what runs the pair.
        findings: what was found in one precision.
    """
    zero, held = findings.zero, findings.held
    pair, found = runner.pair, Coverage()
    known = {match.first.name: match for match in pair.pairing.matches}
    if pair.effort.large:
        _cover_large(runner, [known[name] for name in zero], held, found)
    else:
        _cover(runner, {name: known[name] for name in zero[:MAX_PROBES]}, found)
    found.unreached = [*_unreached(pair), *findings.unreached, *_not_compared(pair, findings.compared), *_given(pair)]
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
            found.unused[name] = runner.pair.shown[idle]
        else:
            found.unexercised.append(name)


def _cover_large(runner: Runner, matches: list[Match], held: Outputs, found: Coverage) -> None:
    """Do the same with one run of one side: all parameters without a gradient change at once."""
    names = [match.first.name for match in matches]
    if matches and held and runner.reaches("first", held, matches, 1.0):
        found.notes.append(f"{', '.join(names)}: the output depends on some of them, but their gradient is zero")
    else:
        found.invariances = names


def _not_compared(pair: Pair, compared: Collection[str]) -> Iterator[str]:
    """Say which paired weights have no gradient that could be compared: complex numbers."""
    for match in pair.pairing.matches:
        dtype = match.first.parameter.dtype
        if f"grad {match.first.name}" not in compared and dtype.startswith("complex"):
            yield f"gradient of {match.first.name}: {dtype} is taken as held; give real and imaginary parts as two"


def _given(pair: Pair) -> Iterator[str]:
    """Say which inputs are the same in every sample: masks that hide nothing first, then whole numbers and the rest."""
    call, names = pair.arguments["first"], pair.first.argument_names
    kept = []
    for i, (name, leaf, mask) in enumerate(zip(call.named(names), call.leaves, calls.masks(call), strict=True)):
        is_constant = leaf.size > 1 and not is_float(leaf) and bool((leaf == leaf.flat[0]).all())
        if is_constant:
            yield f"another {name}: {leaf.flat[0]} everywhere, so that a side may ignore it"
        elif i in pair.fixed or (i not in pair.vary and (mask or not is_float(leaf))):
            kept.append(name)
    kept += call.plain(names)
    if kept:
        yield f"other values of {', '.join(kept)}: taken as given in every sample"


def _unreached(pair: Pair) -> list[str]:
    """Describe the branches that the call does not reach, on both sides."""
    return [line for side in SIDES for line in pair.subject(side).unreached(pair.arguments[side])]
