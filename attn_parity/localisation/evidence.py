"""The numbers at the place of a fault, for whoever looks for its cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..hints import Evidence
from ..pair import SIDES
from ..results.findings import Side
from ..sides.dtypes import wide
from ..sides.subject import Array, Arrays, Call
from .between import Step
from .forcing import Feed, gradients_of, run_both
from .leaves import Group, match_leaves
from .sides import Sides, SubmoduleRunner

TELLING = 1 << 27
"""Most elements of a weight that hints are drawn from."""

MAX_BEFORE = 4
"""Submodules before the code between two whose outputs may go into it: query, key and value, or a gate and its unit."""


def evidence_of(
    sides: Sides,
    runner: SubmoduleRunner | None,
    paths: Mapping[Side, str],
    calls: dict[Side, Call],
    known: Evidence,
) -> Evidence:
    """Return what is known of a pair with its inputs, outputs, weights and gradients added."""
    groups = match_leaves(*(calls[side].arguments.leaves for side in SIDES))
    outputs = match_leaves(*(calls[side].outputs for side in SIDES))
    results = {side: calls[side].outputs for side in SIDES}
    gradients: dict[Side, Arrays] = {"first": {}, "second": {}}
    if runner is not None:
        runs = run_both(runner, paths, calls, Feed(groups), outputs, "first")
        results = {side: runs[side].outputs for side in SIDES}
        gradients = gradients_of(sides.pairing, runs, groups)
    weights = {side: _weights(sides, side, paths["first"]) for side in SIDES}
    return dataclasses.replace(
        known,
        inputs=[wide(one.value("first", calls["first"].arguments.leaves)) for one in groups],
        first_outputs=_values(outputs, "first", results["first"]),
        second_outputs=_values(outputs, "second", results["second"]),
        first_weights=weights["first"],
        second_weights=weights["second"],
        first_gradients=gradients["first"],
        second_gradients=gradients["second"],
    )


def evidence_between(known: Evidence, whole: dict[Side, Call], steps: Sequence[Step]) -> Evidence:
    """Return what goes into the code between two submodules and what comes out of it on each side."""
    assert known.between is not None
    before, after = known.between
    paths = [step.path for step in steps]
    last = len(paths) - paths[::-1].index(before) if before in paths else 0
    given = [step.calls for step in steps[max(0, last - MAX_BEFORE) : last]]
    taken = next((step.calls for step in steps if step.path == after), None)
    ours, its = (
        [leaf for calls in given for leaf in calls[side].outputs] if given else whole[side].arguments.leaves
        for side in SIDES
    )
    results = {side: taken[side].arguments.leaves if taken is not None else whole[side].outputs for side in SIDES}
    outputs = match_leaves(results["first"], results["second"])
    return dataclasses.replace(
        known,
        inputs=[wide(one.value("first", ours)) for one in match_leaves(ours, its)],
        first_outputs=_values(outputs, "first", results["first"]),
        second_outputs=_values(outputs, "second", results["second"]),
    )


def _values(groups: Sequence[Group], side: Side, leaves: Sequence[Array]) -> list[Array]:
    return [wide(group.value(side, leaves)) for group in groups]


def _weights(sides: Sides, side: Side, path: str) -> Arrays:
    """Return the weights of a submodule and of all inside it, under first names."""
    inside = f"{path}." if path else ""
    names = {match.first.name for match in sides.pairing.matches if f"{match.first.parameter.path}.".startswith(inside)}
    aligned = sides.pairing.aligned(sides.weights[side], side)
    return {name: wide(array) for name, array in aligned.items() if name in names and array.size <= TELLING}
