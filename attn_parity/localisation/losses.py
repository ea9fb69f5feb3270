"""Which code between submodules loses precision: it is run on the same held outputs, in both precisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..pair import SIDES
from ..results.findings import Side
from ..sides.subject import Array, Call, Substitute
from ..verdict.criterion import precision_used
from ..verdict.measures import Measure
from .between import Step
from .forcing import Paths
from .leaves import Group, fed, in_dtype, match_leaves
from .sides import Sides, SubmoduleRunner
from .sources import outputs_of
from .weighing import measured


def shares(
    runner: SubmoduleRunner, sides: Sides, paths: Paths, whole: dict[Side, Call], steps: Sequence[Step], copies: int
) -> list[float]:
    """Return the share of its allowance that the code in front of each step takes, and that of the outputs, last.

    The outputs of all submodules are held, rounded to the working precision, so that only the module's own code rounds;
    `copies` of them are tried, slightly moved.
    """
    groups = match_leaves(*(whole[side].arguments.leaves for side in SIDES))
    ends = [*({side: step.calls[side].arguments.leaves for side in SIDES} for step in steps)]
    ends.append({side: whole[side].outputs for side in SIDES})
    matched = [match_leaves(one["first"], one["second"]) for one in ends]
    measures: list[list[Measure]] = [[] for _ in ends]
    for copy in range(copies):
        arguments = fed(whole, groups, "first", copy=copy, dtype=sides.dtype)
        substitutes = {side: _substitutes(steps, side, copy, sides.dtype) for side in SIDES}
        runs = [
            (
                _taken(
                    runner.substituted(side, paths[side], arguments[side], substitutes[side], low=is_low), steps, side
                )
                if is_low or side not in sides.lacks
                else None,
                side,
            )
            for is_low in (True, False)
            for side in SIDES
        ]
        for number, inner in enumerate(matched):
            for position, group in enumerate(inner):
                tensors = [None if run is None else group.value(side, run[number]) for run, side in runs]
                measures[number] += measured(tensors, sides.dtype, position, copy)
    return [_share(one, sides.judged) for one in measures]


def _share(measures: Sequence[Measure], judged: Sequence[Side]) -> float:
    used = dict(zip(SIDES, precision_used(measures) if measures else (0.0, 0.0), strict=True))
    return max(used[side] for side in judged)


def _taken(run: tuple[list[Array], Sequence[Call]], steps: Sequence[Step], side: Side) -> list[Sequence[Array]]:
    """Return the inputs of every step in one run, and the outputs."""
    outputs, calls = run
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.path, []).append(call)
    found: list[Sequence[Array]] = []
    for step in steps:
        own = step.calls[side]
        number = [one.calls[side] for one in steps if one.calls[side].path == own.path].index(own)
        found.append(by_path[own.path][number].arguments.leaves)
    return [*found, outputs]


def _substitutes(steps: Sequence[Step], side: Side, copy: int, dtype: str) -> Mapping[str, list[Substitute]]:
    found: dict[str, list[Substitute]] = {}
    for number, step in enumerate(steps):
        call = step.calls[side]
        outputs: list[Array | None] = [None] * len(call.outputs)
        for group in outputs_of(step.calls) or ():
            value = group.given(side, _value(group, step, copy, number, dtype))
            for position in group.places(side):
                outputs[position] = value
        found.setdefault(call.path, []).append(Substitute(outputs, [None] * len(call.arguments.leaves)))
    return found


def _value(group: Group, step: Step, copy: int, number: int, dtype: str) -> Array:
    """Return what a submodule returned on the first side, moved a little for each copy, in the working precision."""
    value = group.value("first", step.calls["first"].outputs)
    if copy:
        random = np.random.default_rng([copy, number, group.first[0]])
        value = value * (1.0 + 2.0**-10 * random.normal(size=value.shape))
    return in_dtype(value, dtype)
