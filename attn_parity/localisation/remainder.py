"""The difference that remains when accepted submodules of the second side return the first side's numbers.

They return the outputs of the first side's submodules, and propagate the first side's gradients. If all else then
agrees, the difference follows from them; if not, something else differs as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from ..matching.submodule_pairs import pair_modules
from ..pair import SIDES, Pair
from ..results.findings import Divergence, Side, shown
from ..samples.sampling import Sample
from ..sides.subject import Array, Call, Run, Substitute
from ..verdict.measures import scale_of
from .between import PairedCall
from .leaves import apart, distance, match_inputs, match_leaves, match_outputs
from .search import LIMIT, SURE
from .sides import FAILURES, Sides, SubmoduleRunner, calls_of, sides_of
from .trials.forcing import Feed, apart_in, gradients_of, run_both
from .trials.weighing import rounding

Remainder = Divergence | Literal["nothing", "unknown"]
"""The remaining divergence; ``nothing`` if all else agrees; ``unknown`` if undetermined."""


def remainder(pair: Pair, sample: Sample, accepted: Collection[str], allowed: float = 0.0) -> Remainder:
    """Return the remaining difference when the submodules at some paths are the first side's.

    Args:
        pair: the two sides, paired.
        sample: numbers on which they differ.
        accepted: paths of submodules, as either side calls them.
        allowed: relative difference that tables in float32 explain.
    """
    sides = sides_of(pair, sample)
    if sides.lacks or any(not hasattr(one, "substituted") for one in sides.subjects.values()):
        return "unknown"
    runner = SubmoduleRunner(sides)
    try:
        calls, problems = calls_of(sides, runner)
        if problems:
            return "unknown"
        pairs = _pairs(sides, calls)
        targets = _outermost({one: two for one, two in pairs.items() if one and (one in accepted or two in accepted)})
        substitutes = {two: _substitutes(runner, sides, one, two, calls) for one, two in targets.items()}
        if not substitutes or not all(substitutes.values()):
            return "unknown"
        whole = {side: next(one for one in calls[side] if not one.path) for side in SIDES}
        run = runner.run("first", "", whole["first"].arguments, whole["first"].cotangents)
        second = sides.subjects["second"]
        weights, call = runner.weights("second"), whole["second"]
        other, inner = second.substituted(weights, call.arguments, call.cotangents, substitutes)
    except FAILURES:
        return "unknown"
    forward, backward = _apart(sides, whole, {"first": run, "second": other}, targets)
    forward = max(forward, *(_given_apart(calls["first"], inner, *both) for both in targets.items()))
    limit = max(LIMIT, allowed)
    if LIMIT < max(forward, backward) <= SURE:
        limit = max(limit, rounding(runner, sides, {"first": "", "second": ""}, whole))
    if max(forward, backward) <= limit:
        return "nothing"
    names = " and ".join(targets)
    premise = f"with the numbers of {shown(sides.labels['first'])} in place of those of {names}"
    if forward <= limit:
        return Divergence("", "", "backward", f"{premise}, gradients still differ by {backward:.2g} of the largest")
    path, between = _place({"first": calls["first"][1:], "second": inner}, pairs, limit)
    message = f"{premise}, what is computed still differs by {forward:.2g} of the largest value"
    return Divergence(path, pairs.get(path, ""), "forward", message, between)


def _pairs(sides: Sides, calls: Mapping[Side, Sequence[Call]]) -> dict[str, str]:
    first, second = (sides.subjects[side].modules() for side in SIDES)
    called = {side: {call.path: [leaf.size for leaf in call.outputs] for call in calls[side]} for side in SIDES}
    return pair_modules(sides.pairing.matches, first, second, called)


def _outermost(targets: Mapping[str, str]) -> dict[str, str]:
    return {one: two for one, two in targets.items() if not any(one.startswith(f"{outer}.") for outer in targets)}


def _substitutes(
    runner: SubmoduleRunner, sides: Sides, path: str, second_path: str, calls: Mapping[Side, Sequence[Call]]
) -> list[Substitute]:
    """Return replacements that turn a second-side submodule's calls into the first side's; empty if they don't fit."""
    paths: dict[Side, str] = {"first": path, "second": second_path}
    mine, its = ([call for call in calls[side] if call.path == paths[side]] for side in SIDES)
    if len(mine) != len(its):
        return []
    substitutes = []
    for first_call, second_call in zip(mine, its, strict=True):
        pair_of_calls: dict[Side, Call] = {"first": first_call, "second": second_call}
        groups = match_leaves(first_call.arguments.leaves, second_call.arguments.leaves)
        outputs = match_outputs(pair_of_calls)
        runs = run_both(runner, paths, pair_of_calls, Feed(groups), outputs, "first")
        values: list[Array | None] = [None] * len(second_call.outputs)
        for group in outputs:
            value = group.given("second", group.value("first", first_call.outputs))
            for position in group.second:
                values[position] = value
        added: list[Array | None] = [None] * len(second_call.arguments.leaves)
        for group in groups:
            totals = [group.total(side, runs[side].input_gradients) for side in SIDES]
            if totals[0] is not None and totals[1] is not None:
                added[group.second[0]] = group.given("second", totals[0] - totals[1])
        substitutes.append(Substitute(values, added))
    return substitutes


def _apart(
    sides: Sides, whole: dict[Side, Call], runs: dict[Side, Run], targets: Mapping[str, str]
) -> tuple[float, float]:
    """Return the relative differences of outputs and gradients, but for those of the accepted submodules."""
    outputs = match_outputs(whole)
    forward = apart_in(runs, outputs)
    groups = match_inputs(whole)
    gradients = gradients_of(sides.pairing, runs, groups)
    scale = scale_of([array for arrays in gradients.values() for array in arrays.values()]) or 1.0
    left = [name for name in gradients["first"] if not any(name.startswith(f"{path}.") for path in targets)]
    largest = max((distance(gradients["first"][name], gradients["second"][name]) for name in left), default=0.0)
    return forward, largest / scale


def _given_apart(first: Sequence[Call], second: Sequence[Call], path: str, second_path: str) -> float:
    """Return the largest difference of the accepted submodule's inputs, which nothing behind it shows."""
    mine, its = ([call for call in calls if call.path == one] for calls, one in ((first, path), (second, second_path)))
    distances = [0.0]
    for first_call, second_call in zip(mine, its, strict=True):
        pair_of_calls: dict[Side, Call] = {"first": first_call, "second": second_call}
        distances.append(
            apart(pair_of_calls, match_leaves(first_call.arguments.leaves, second_call.arguments.leaves), "inputs")
            or 0.0
        )
    return max(distances)


def _place(
    calls: Mapping[Side, Sequence[Call]], pairs: Mapping[str, str], limit: float
) -> tuple[str, tuple[str, str] | None]:
    """Return the module whose code differs, and the two submodules around the fault (None: in the module itself).

    The first call with differing inputs or outputs, in order of execution, decides.
    """
    second: dict[str, list[Call]] = {}
    for call in calls["second"]:
        second.setdefault(call.path, []).append(call)
    before = ""
    for call in sorted(calls["first"], key=lambda call: call.order):
        its = second.get(pairs.get(call.path, ""), [])
        if call.number >= len(its):
            continue
        step = PairedCall(call.path, {"first": call, "second": its[call.number]})
        if step.differs("inputs", limit):
            parent = call.path.rpartition(".")[0]
            inside = before if before.startswith(f"{parent}.") or not parent else parent
            return parent, (inside, call.path)
        if step.differs("outputs", limit) and not any(one.path.startswith(f"{call.path}.") for one in calls["first"]):
            return call.path, None
        before = call.path
    return "", (before, "") if before else None
