"""Run one pair of submodules alone: on the same inputs, forward and backward, from each side in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ...hints import Evidence
from ...pair import SIDES
from ...pairing import Pairing
from ...results.findings import Side
from ...sides.arrays import wide
from ...sides.subject import Array, Arrays, Call, Run
from ...verdict.measures import scale_of
from ..between import PairedCall
from ..leaves import (
    LeafGroup,
    apart,
    distance,
    fed,
    fed_cotangents,
    got_apart,
    match_by_place,
    match_inputs,
    match_leaves,
    match_outputs,
    other_layouts,
    relative,
    whole_numbers,
)
from ..sides import Sides, SubmoduleRunner

Paths = Mapping[Side, str]


@dataclasses.dataclass(frozen=True)
class Feed:
    """How one call is fed to both sides.

    Attributes:
        groups: which arrays are the same.
        discrete: positions of integers that are taken over, too.
        exchanged: whether the sides exchange integers, or the order of the inputs.
    """

    groups: Sequence[LeafGroup]
    discrete: Sequence[tuple[int, int]] = ()
    exchanged: bool = False


@dataclasses.dataclass(frozen=True)
class CallTrial:
    """Measures of one pair of calls; differences are relative to the largest value and None if not run.

    Attributes:
        error_in: difference of the inputs as both sides ran freely.
        error_out: difference of the outputs as both sides ran freely.
        forward: difference of the outputs, on the same inputs.
        backward: difference of the gradients, on the same inputs.
        worst: the gradient that differs the most.
        exchanged: whether the sides agree only when one takes over the other's integers, or the order of its inputs.
        problem: why it could not run alone.
    """

    error_in: float | None = None
    error_out: float | None = None
    forward: float | None = None
    backward: float | None = None
    worst: str = ""
    exchanged: bool = False
    problem: str = ""


def force(
    runner: SubmoduleRunner,
    pairing: Pairing,
    paths: Paths,
    calls: dict[Side, Call],
    limit: float,
    *,
    strict: bool = False,
) -> CallTrial:
    """Run a pair of submodules alone, on the inputs of each side in turn.

    Args:
        runner: runs submodules.
        pairing: the paired parameters.
        paths: their paths.
        calls: one call of each, as recorded.
        limit: difference above which other ways to feed the call are tried.
        strict: whether inputs are to be taken as they are (the whole module's).
    """
    outputs = match_outputs(calls)
    feeds = _feeds(calls, strict=strict)
    free = CallTrial(apart(calls, feeds[0].groups, "inputs"), apart(calls, outputs, "outputs"))
    if not outputs:
        return dataclasses.replace(free, problem=shapes_apart(calls))
    best: CallTrial | None = None
    for feed in feeds:
        measured = dataclasses.replace(free, exchanged=feed.exchanged)
        matched = outputs
        for source in SIDES:
            runs = run_both(runner, paths, calls, feed, matched, source)
            forward = apart_in(runs, matched)
            if forward > limit and not strict:  # as both ran freely, outputs need not tell the order of their axes
                again = match_leaves(runs["first"].outputs, runs["second"].outputs)
                if apart_in(runs, again) <= limit and len(again) == len(matched):
                    matched = again
                    runs = run_both(runner, paths, calls, feed, matched, source)
                    forward = apart_in(runs, matched)
            gradients = gradients_apart(gradients_of(pairing, runs, feed.groups))
            backward = max(gradients.values(), default=0.0)
            if backward > (measured.backward or 0.0):
                worst = max(gradients, key=lambda name: gradients[name])
                if not paths["first"]:  # a submodule's call has no names
                    leaf_names = calls["first"].arguments.named(runner.argument_names)
                    inputs = [[leaf_names[place] for place in group.places("first")] for group in feed.groups]
                    worst = {f"input {i}": " and ".join(names) for i, names in enumerate(inputs)}.get(worst, worst)
                measured = dataclasses.replace(measured, worst=f"the gradient of {worst}")
            measured = dataclasses.replace(
                measured,
                forward=max(forward, measured.forward or 0.0),
                backward=max(backward, measured.backward or 0.0),
            )
        # The first way to feed, the likeliest, counts unless another makes the sides agree.
        if best is None or (measured.forward or 0.0) <= limit:
            best = measured
        if (best.forward or 0.0) <= limit:
            break
    assert best is not None
    if (best.forward or 0.0) > limit and not strict and got_apart(calls, feeds[0].groups):
        return dataclasses.replace(free, problem=f"its inputs have other shapes: {_shapes(calls, 'inputs')}")
    return best


def shapes_apart(calls: Mapping[Side, Call]) -> str:
    """Return a message on the different output shapes of two calls."""
    return f"its outputs have other shapes: {_shapes(calls, 'outputs')}"


def _shapes(calls: Mapping[Side, Call], what: Literal["inputs", "outputs"]) -> str:
    leaves = (calls[side].arguments.leaves if what == "inputs" else calls[side].outputs for side in SIDES)
    return " and ".join(", ".join(str(leaf.shape) for leaf in each) for each in leaves)


def apart_in(runs: Mapping[Side, Run], outputs: Sequence[LeafGroup]) -> float:
    """Return how far apart the outputs of two runs are, relative to the largest value of each."""
    return relative(
        [(one.value("first", runs["first"].outputs), one.value("second", runs["second"].outputs)) for one in outputs]
    )


def compare_freely(calls: dict[Side, Call], limit: float) -> CallTrial:
    """Compare one recorded call of each side; the outputs count only if the inputs agree and contain no integers."""
    groups = match_inputs(calls)
    outputs = match_outputs(calls)
    error_in, error_out = apart(calls, groups, "inputs"), apart(calls, outputs, "outputs")
    # Unequal whole numbers are other inputs, too: indices, or a mask.
    agree = (error_in or 0.0) <= limit and not whole_numbers(calls["first"].arguments, calls["second"].arguments)
    return CallTrial(error_in, error_out, error_out if agree else None)


def run_both(
    runner: SubmoduleRunner,
    paths: Paths,
    calls: dict[Side, Call],
    feed: Feed,
    outputs: Sequence[LeafGroup],
    source: Side,
) -> dict[Side, Run]:
    """Run both sides on one side's numbers."""
    arguments = fed(calls, feed.groups, source, discrete=feed.discrete)
    cotangents = fed_cotangents(calls, outputs, source)
    return {side: runner.run(side, paths[side], arguments[side], cotangents[side]) for side in SIDES}


def _feeds(calls: dict[Side, Call], *, strict: bool) -> list[Feed]:
    """Return the ways to feed both calls the same, the likeliest first."""
    arguments = [calls[side].arguments for side in SIDES]
    matched = match_leaves(arguments[0].leaves, arguments[1].leaves)
    feeds = [Feed(matched)]
    if strict:
        return feeds
    groupings = [matched]
    by_place = match_by_place(arguments[0], arguments[1])
    if by_place is not None and by_place != matched:
        groupings.append(by_place)
    differing = whole_numbers(arguments[0], arguments[1])
    feeds += [Feed(one, exchanged=True) for one in groupings[1:]]
    feeds += [Feed(one, differing, exchanged=True) for one in groupings if differing]
    feeds += [Feed(one) for one in other_layouts(arguments[0].leaves, arguments[1].leaves, matched)]
    return feeds


def gradients_of(pairing: Pairing, runs: Mapping[Side, Run], groups: Sequence[LeafGroup]) -> dict[Side, Arrays]:
    """Return the gradients of both sides by name, with the first side's axes, where both have them."""
    gradients: dict[Side, Arrays] = {side: {} for side in SIDES}
    for position, group in enumerate(groups):
        totals = {side: group.total(side, runs[side].input_gradients) for side in SIDES}
        for side, total in totals.items():
            if total is not None and all(one is not None for one in totals.values()):
                gradients[side][f"input {position}"] = total
    aligned = {side: pairing.aligned(runs[side].parameter_gradients, side) for side in SIDES}
    for side in SIDES:
        gradients[side] |= {
            name: array
            for name, array in aligned[side].items()
            if name in aligned["second"] and name in aligned["first"]
        }
    return gradients


def gradients_apart(gradients: Mapping[Side, Arrays]) -> dict[str, float]:
    """Return name -> difference of each gradient, relative to the largest of all."""
    scale = scale_of([array for arrays in gradients.values() for array in arrays.values()]) or 1.0
    return {name: distance(one, gradients["second"][name]) / scale for name, one in gradients["first"].items()}


TELLING = 1 << 27
"""Most elements of a weight that hints are drawn from."""

MAX_BEFORE = 4
"""Submodules before the code between two whose outputs may go into it: query, key and value, or a gate and its unit."""


def evidence_of(
    sides: Sides,
    runner: SubmoduleRunner | None,
    paths: Mapping[Side, str],
    calls: dict[Side, Call],
    evidence: Evidence,
) -> Evidence:
    """Return the evidence on a pair with its inputs, outputs, weights and gradients added."""
    groups = match_inputs(calls)
    outputs = match_outputs(calls)
    results = {side: calls[side].outputs for side in SIDES}
    gradients: dict[Side, Arrays] = {"first": {}, "second": {}}
    if runner is not None:
        runs = run_both(runner, paths, calls, Feed(groups), outputs, "first")
        results = {side: runs[side].outputs for side in SIDES}
        gradients = gradients_of(sides.pairing, runs, groups)
    weights = {side: _weights(sides, side, paths["first"]) for side in SIDES}
    return dataclasses.replace(
        evidence,
        inputs=[wide(one.value("first", calls["first"].arguments.leaves)) for one in groups],
        counts_alike=all(one.turn.counts_alike for one in (*groups, *outputs)),
        first_outputs=_values(outputs, "first", results["first"]),
        second_outputs=_values(outputs, "second", results["second"]),
        first_weights=weights["first"],
        second_weights=weights["second"],
        first_gradients=gradients["first"],
        second_gradients=gradients["second"],
    )


def evidence_between(evidence: Evidence, whole: dict[Side, Call], steps: Sequence[PairedCall]) -> Evidence:
    """Return the evidence of the code between two submodules: its inputs and outputs on each side."""
    assert evidence.between is not None
    before, after = evidence.between
    paths = [step.path for step in steps]
    last = len(paths) - paths[::-1].index(before) if before in paths else 0
    steps_before = steps[max(0, last - MAX_BEFORE) : last]
    calls_after = [step.calls for step in steps if step.path == after]

    def all_calls(step: PairedCall) -> list[dict[Side, Call]]:
        """Return the calls that go with those of the step behind: in a loop, all of them."""
        same = [one.calls for one in steps if one.path == step.path]
        return same if len(same) == len(calls_after) else [step.calls]

    ours, its = (
        [leaf for step in steps_before for leaf in _joined([calls[side].outputs for calls in all_calls(step)])]
        if steps_before
        else whole[side].arguments.leaves
        for side in SIDES
    )
    results = {
        side: _joined([calls[side].arguments.leaves for calls in calls_after]) if calls_after else whole[side].outputs
        for side in SIDES
    }
    outputs = match_leaves(results["first"], results["second"]) if calls_after else match_outputs(whole)
    inputs = match_leaves(ours, its)
    return dataclasses.replace(
        evidence,
        inputs=[wide(one.value("first", ours)) for one in inputs],
        counts_alike=all(one.turn.counts_alike for one in (*inputs, *outputs)),
        first_outputs=_values(outputs, "first", results["first"]),
        second_outputs=_values(outputs, "second", results["second"]),
    )


def _joined(calls: Sequence[Sequence[Array]]) -> Sequence[Array]:
    """Join the arrays of repeated calls by their first axis: what holds in one step of a loop need not hold in all."""
    alike = len({tuple((leaf.shape, leaf.dtype) for leaf in leaves) for leaves in calls}) == 1
    if len(calls) == 1 or not alike or not all(leaf.ndim for leaf in calls[0]):
        return calls[0]
    return [np.concatenate(same) for same in zip(*calls, strict=True)]


def _values(groups: Sequence[LeafGroup], side: Side, leaves: Sequence[Array]) -> list[Array]:
    return [wide(group.value(side, leaves)) for group in groups]


def _weights(sides: Sides, side: Side, path: str) -> Arrays:
    """Return the weights of a submodule and of all inside it, under first names."""
    inside = f"{path}." if path else ""
    names = {match.first.name for match in sides.pairing.matches if f"{match.first.parameter.path}.".startswith(inside)}
    aligned = sides.pairing.aligned(sides.weights[side], side)
    return {name: wide(array) for name, array in aligned.items() if name in names and array.size <= TELLING}
