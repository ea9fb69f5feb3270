"""Narrow down the code between submodules that all agree: the part at fault, and the parts not excluded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..pair import SIDES
from ..results.findings import Candidate, Side
from ..sides.subject import Arguments, Array, Call, Substitute
from ..verdict.criterion import precision_used
from ..verdict.measures import Measure
from .between import Direction, PairedCall, calls_inside, is_among, located, next_of, steps_of
from .leaves import (
    LeafGroup,
    apart,
    fed,
    fed_cotangents,
    in_dtype,
    is_turned,
    match_inputs,
    match_leaves,
    match_outputs,
    relative,
    whole_numbers,
)
from .sides import FAILURES, Sides, SubmoduleRunner
from .sources import INPUTS, WORK, Overlap, Sources, edges, outputs_of, overlap
from .tree import Node, nearest
from .trials.forcing import Feed, Paths, compare_freely, run_both
from .trials.weighing import COPIES, measured

SMALL_PART = 0.1
"""Share of the worst submodule's loss below which a submodule is not reported as the start of a loss of precision."""

Limit = Callable[[Node, Direction], float]
"""Returns the largest relative difference that is allowed for a pair of submodules."""


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """The code at fault inside one module.

    Attributes:
        candidates: the places that were not excluded, the likeliest first.
        steps: the calls of submodules in it, in order of execution.
        chain: the two calls around the fault by order of execution alone.
    """

    candidates: tuple[Candidate, ...] = ()
    steps: Sequence[PairedCall] = ()
    chain: tuple[str, str] | None = None


class Narrowing:
    """Narrows a fault that none of a module's own submodules shows to code between calls of them.

    Args:
        sides: the pair.
        calls: all recorded calls, by side.
        runner: runs submodules; None where there are recorded numbers alone.
        limit_of: see `Limit`.
    """

    def __init__(
        self, sides: Sides, calls: Mapping[Side, Sequence[Call]], runner: SubmoduleRunner | None, limit_of: Limit
    ) -> None:
        self._sides, self._calls, self._runner, self._limit_of = sides, calls, runner, limit_of

    def narrowed(self, node: Node, direction: Direction) -> Narrowed:
        """Return the places in the module's code that were not excluded."""
        for number, calls in enumerate(node.calls):
            trial = node.trials[number] if number < len(node.trials) else None
            error = None if trial is None else trial.forward if direction == "forward" else trial.backward
            if error is None or error <= self._limit_of(node, direction):
                continue
            steps = self.steps(node, calls, direction)
            if steps:
                return self._narrowed(node, calls, steps, direction)
        return Narrowed()

    def _narrowed(self, node: Node, calls: dict[Side, Call], steps: list[PairedCall], direction: Direction) -> Narrowed:
        path, limit = node.path or "", self._limit_of(node, direction)

        def backward(step: PairedCall | None) -> dict[Side, list[Array | None]]:
            return self._input_gradients(node, calls, step)

        pairs, is_sure = located(path, steps, calls, direction, limit, backward)
        if not pairs:
            return Narrowed(steps=steps)
        chain = pairs[0]
        earlier: Sequence[PairedCall] = []
        if direction == "forward" and (turning := self._turning(node, calls, steps, chain)) is not None:
            return turning
        if direction == "forward":
            pairs, earlier = self._behind(node, calls, steps, chain)
            pairs += self._exchanged(node, calls, steps, chain)
        elif not is_sure:
            pairs = self._before(node, calls, steps, chain)
        within, second = self._within(node, chain)
        ends = [(_end(before, path, within), _end(after, path, within)) for before, after in pairs]
        candidates = [Candidate(within, second, one) for one in dict.fromkeys(ends)]
        candidates = self._with_unjudged(node, candidates, earlier, limit)
        candidates += _sharing(node, calls, steps, candidates)
        return Narrowed(tuple(candidates), steps, chain)

    def losing(self, node: Node, least: float) -> Narrowed:
        """Return the places in the module's code that lose precision, where none of its submodules does.

        Args:
            node: the module.
            least: smallest share of the allowance that counts as a loss.
        """
        if self._runner is None or not node.calls:
            return Narrowed()
        calls = node.calls[0]
        path, steps = node.path or "", self.steps(node, calls, "forward")
        if not steps:
            return Narrowed()
        try:
            copies = max(1, min(COPIES, WORK // self._size(node, steps)))
            used = shares(self._runner, self._sides, node.paths, calls, steps, copies)
        except FAILURES:
            return Narrowed(steps=steps)
        number = next((i for i, share in enumerate(used) if share > max(least, SMALL_PART * max(used))), None)
        if number is None:
            return Narrowed(steps=steps)
        target = steps[number] if number < len(steps) else None
        sources = self._sources(node, calls, steps, target)
        pairs = edges(steps, target, (sources.feeding() if sources is not None else None) or None, path)
        second = node.paths["second"]
        return Narrowed(tuple(Candidate(path, second, pair) for pair in pairs), steps, pairs[0])

    def _behind(
        self, node: Node, calls: dict[Side, Call], steps: Sequence[PairedCall], chain: tuple[str, str]
    ) -> tuple[list[tuple[str, str]], Sequence[PairedCall]]:
        """Return the candidates in front of the first step with differing inputs, and the calls that feed it."""
        path, limit = node.path or "", self._limit_of(node, "forward")
        target = next((step for step in steps if step.path == chain[1] and step.differs("inputs", limit)), None)
        sources = self._sources(node, calls, steps, target)
        positions = None if sources is None else sources.found()
        pairs = sorted(edges(steps, target, positions, path), key=lambda pair: pair != chain)
        if sources is not None and chain not in pairs and chain in edges(steps, target, sources.feeds, path):
            pairs.insert(1, chain)  # what adds the parts up comes behind it, and no numbers tell it from a part
        if positions is None:
            return pairs, [step for step in steps if target is None or step.order < target.order]
        return pairs, [steps[i] for i in positions if i != INPUTS]

    def _turning(
        self, node: Node, calls: dict[Side, Call], steps: Sequence[PairedCall], chain: tuple[str, str]
    ) -> Narrowed | None:
        """Return the submodule that returns axes exchanged, or the code in front of it, if these alone are the fault.

        A table of the positions k - q holds the numbers of q - k with axes exchanged, as another layout would.
        """
        path, limit = node.path or "", self._limit_of(node, "forward")
        target = next((step for step in steps if step.path == chain[1] and step.differs("inputs", limit)), None)
        for position, step in enumerate(steps):
            if not is_turned(match_outputs(step.calls)) or step is target:
                continue
            sources = self._sources(node, calls, steps, target)
            if sources is None or not sources.agrees_plainly(position):
                continue
            child = next(one for one in judgeable(node) if one.path == step.path)
            arguments = [step.calls[side].arguments for side in SIDES]
            if not whole_numbers(*arguments) and not is_turned(match_inputs(step.calls)):
                return Narrowed((Candidate(child.paths["first"], child.paths["second"]),), steps, chain)
            own = self._sources(node, calls, steps, step)
            feeding = own.feeding() if own is not None else None
            pairs = edges(steps, step, feeding or None, path)
            within, second = self._within(node, pairs[0])
            return Narrowed(tuple(Candidate(within, second, pair) for pair in pairs), steps, pairs[0])
        return None

    def _exchanged(
        self, node: Node, calls: dict[Side, Call], steps: Sequence[PairedCall], chain: tuple[str, str]
    ) -> list[tuple[str, str]]:
        """Return the code in front of the first inputs that agree only with axes exchanged, though shapes ask for none.

        Code behind may exchange them back, as layouts do, or nothing may: both are possible.
        """
        usual = {group.turn.axes for group in match_inputs(calls)}
        for step in steps:
            if step.path == chain[1]:
                break
            turns = [group.turn for group in match_inputs(step.calls)]
            if any(not turn.is_plain and turn.first == turn.second and turn.axes not in usual for turn in turns):
                sources = self._sources(node, calls, steps, step)
                feeding = sources.feeding() if sources is not None else None
                return edges(steps, step, feeding or None, node.path or "")
        return []

    def _before(
        self, node: Node, calls: dict[Side, Call], steps: Sequence[PairedCall], chain: tuple[str, str]
    ) -> list[tuple[str, str]]:
        """Return the candidates behind a call with a differing gradient, up to the calls that take its output."""
        path = node.path or ""
        sources = self._sources(node, calls, steps, None)
        number = max((i for i, step in enumerate(steps) if step.path == chain[0]), default=INPUTS)
        ends = [] if sources is None else sources.fed_by(number)
        pairs = [(chain[0], path if end is None else end.path) for end in ends] or [chain]
        return sorted(pairs, key=lambda pair: pair != chain)

    def _sources(
        self, node: Node, calls: dict[Side, Call], steps: Sequence[PairedCall], target: PairedCall | None
    ) -> Sources | None:
        if self._runner is None:
            return None
        arguments = {side: arguments for side, (arguments, _) in same_call(calls).items()}
        same = {side: dataclasses.replace(calls[side], arguments=arguments[side]) for side in SIDES}
        size = self._size(node, steps)
        return Sources(self._runner, node.paths, same, steps, target, self._limit_of(node, "forward"), size)

    def _size(self, node: Node, steps: Sequence[PairedCall]) -> int:
        """Return the number of elements of a run: outputs of the submodules, and weights."""
        inside = f"{node.path}." if node.path else ""
        weights = sum(array.size for name, array in self._sides.weights["first"].items() if name.startswith(inside))
        return weights + sum(leaf.size for step in steps for leaf in step.calls["first"].outputs) + 1

    def _within(self, node: Node, chain: tuple[str, str]) -> tuple[str, str]:
        """Return the paths of the innermost module around both ends that could not be judged alone."""
        enclosing = node
        while True:
            holders = (one for one in _unjudged(enclosing) if all(end.startswith(f"{one.path}.") for end in chain))
            inner = next(holders, None)
            if inner is None:
                return enclosing.paths["first"], enclosing.paths["second"]
            enclosing = inner

    def _with_unjudged(
        self, node: Node, candidates: list[Candidate], earlier: Sequence[PairedCall], limit: float
    ) -> list[Candidate]:
        """Add the submodules before the code that could not be judged, as their outputs have other shapes."""
        likeliest: list[Candidate] = []
        others: list[Candidate] = []
        for child in _unjudged(node):
            calls = next((step.calls for step in reversed(earlier) if step.path == child.path), None)
            if calls is None or outputs_of(calls) is not None:
                continue
            common = _overlap(calls, limit)
            if common is not None:
                child.message = f"{child.message}; {common.words(self._sides.labels)}"
            between = candidates[0].between
            is_next = common is None and between is not None and between[0] == child.path
            (likeliest if is_next else others).append(Candidate(child.paths["first"], child.paths["second"]))
        if others and likeliest:  # no numbers tell several apart, nor from the code that they have in common
            return [*candidates, *likeliest, *others]
        return [*likeliest, *candidates, *others]

    def steps(
        self,
        node: Node,
        calls: dict[Side, Call],
        direction: Direction,
        *,
        loose: bool = False,
        parts: Sequence[Node] | None = None,
    ) -> list[PairedCall]:
        """Return the calls of submodules inside one call of a module that is fed the same on both sides.

        Args:
            node: the module.
            calls: the call, by side.
            direction: in which gradients have to be the same as well.
            loose: see `steps_of`.
            parts: the submodules; None for the nearest that could be judged.
        """
        nearest_parts = judgeable(node) if parts is None else parts
        children = [child for child in nearest_parts if child.path and child.second_path and child.standing != "front"]
        inside = self._inside(node, calls, direction, self._limit_of(node, direction)) if children else None
        if inside is None:
            return []
        pairs = {child.path: child.second_path for child in children if child.path and child.second_path}
        exchanged = {child.path for child in children if child.path and child.exchanged}
        return steps_of(pairs, inside, exchanged, loose=loose)

    def ends_in_a_part(self, node: Node) -> bool:
        """Return whether a submodule has submodules, and returns the outputs of the last, such as an activation."""
        ends, parts = [], 0
        for side, call in node.calls[0].items() if node.calls else ():
            inner = calls_inside(self._calls[side], node.paths[side], call)
            below = [part for part in inner if part.path.startswith(f"{node.paths[side]}.")]
            parts += len(below)
            last = max(below, key=lambda part: part.order, default=call)
            ends.append(all(is_among(output, last.outputs) for output in call.outputs))
        return all(ends) and parts > 0

    def behind_a_part(self, parent: Node, node: Node) -> Iterator[Candidate]:
        """Yield the code behind a submodule, if its counterpart returns what only a part of it computes.

        timm's norms hold the activation behind them, which other code applies itself.
        """
        if node is parent or not parent.calls or not node.calls:
            return
        returned = {side: call.outputs for side, call in node.calls[0].items()}
        for side, other in (SIDES, SIDES[::-1]):
            inner = [call for call in self._calls[side] if call.path.startswith(f"{node.paths[side]}.")]
            leaves = [leaf for call in inner for leaf in (*call.arguments.leaves, *call.outputs)]
            groups = match_leaves(leaves, returned[other])
            pairs = [(one.value("first", leaves), one.value("second", returned[other])) for one in groups]
            if pairs and relative(pairs) <= self._limit_of(node, "forward"):
                steps = self.steps(parent, parent.calls[0], "forward", loose=True)
                step = next((one for one in steps if one.path == node.path), None)
                following = next_of(step, steps, parent.calls[0]) if step is not None else None
                after = following.path if following is not None else parent.paths["first"]
                yield Candidate(parent.paths["first"], parent.paths["second"], (node.paths["first"], after))
                return

    def _input_gradients(
        self, node: Node, calls: dict[Side, Call], step: PairedCall | None
    ) -> dict[Side, list[Array | None]]:
        """Return the gradients with respect to the inputs of a module or of a step in it, with first axes."""
        child = node if step is None else next(one for one in judgeable(node) if one.path == step.path)
        pair_of_calls = calls if step is None else step.calls
        groups = match_inputs(pair_of_calls)
        outputs = match_outputs(pair_of_calls)
        if self._runner is None:
            return {side: [] for side in SIDES}
        try:
            runs = run_both(self._runner, child.paths, pair_of_calls, Feed(groups), outputs, "first")
        except FAILURES:
            return {side: [] for side in SIDES}
        return {side: [group.total(side, runs[side].input_gradients) for group in groups] for side in SIDES}

    def _inside(
        self, node: Node, calls: dict[Side, Call], direction: Direction, limit: float
    ) -> dict[Side, list[Call]] | None:
        """Return the calls inside one call of the module on the same inputs; None if they cannot be recorded."""
        free = compare_freely(calls, limit)
        as_recorded = not node.refed and (free.error_in or 0.0) <= limit
        if as_recorded and (direction == "forward" or self._same_cotangents(calls, limit)):
            return {side: calls_inside(self._calls[side], node.paths[side], calls[side]) for side in SIDES}
        if self._runner is None:
            return None
        calls_of_sides: dict[Side, list[Call]] = {}
        try:
            for side, (arguments, cotangents) in same_call(calls).items():
                calls_of_sides[side] = self._runner.record(side, node.paths[side], arguments, cotangents)
        except FAILURES:
            return None
        return calls_of_sides

    def _same_cotangents(self, calls: dict[Side, Call], limit: float) -> bool:
        groups = match_outputs(calls)
        return (apart(calls, groups, "cotangents") or 0.0) <= limit


def _is_judged(node: Node) -> bool:
    return node.forward is not None or node.backward is not None


def judgeable(node: Node) -> Iterator[Node]:
    """Yield the nearest judged submodules, descending into those that could not run on both sides."""
    for child in nearest(node):
        inner = [] if _is_judged(child) else [one for one in nearest(child) if one.path and one.second_path]
        if inner:
            yield from judgeable(child)
        else:
            yield child


def _unjudged(node: Node) -> list[Node]:
    return [child for child in nearest(node) if child.path and child.second_path and not _is_judged(child)]


def _sharing(
    node: Node, calls: dict[Side, Call], steps: Sequence[PairedCall], candidates: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield the submodules that share the work of the first place, which is next to parts of theirs.

    Of one without parts, the code behind it comes next: a fault there looks the same.
    """
    ends = (candidates[0].between if candidates else None) or ()
    for child in _unjudged(node):
        if not child.standing.startswith("shared") or sum(f"{end}.".startswith(f"{child.path}.") for end in ends) != 1:
            continue
        yield Candidate(child.paths["first"], child.paths["second"])
        step = next((one for one in steps if one.path == child.path), None)
        if child.standing == "shared in front" and step is not None:
            following = next_of(step, steps, calls)
            after = following.path if following is not None else candidates[0].path
            yield Candidate(candidates[0].path, candidates[0].second_path, (child.paths["first"], after))


def _end(name: str, path: str, within: str) -> str:
    """Return one end of a gap within a narrower module: `within` for the module itself and for ends outside."""
    return within if name == path or not f"{name}.".startswith(f"{within}." if within else "") else name


def _overlap(calls: Mapping[Side, Call], limit: float) -> Overlap | None:
    first, second = (calls[side].outputs for side in SIDES)
    return overlap(first[0], second[0], limit) if len(first) == len(second) == 1 else None


def same_call(calls: dict[Side, Call]) -> dict[Side, tuple[Arguments, list[Array | None]]]:
    """Return one call as both sides take it, fed with the first side's numbers."""
    groups = match_inputs(calls)
    arguments = fed(calls, groups, "first")
    cotangents = fed_cotangents(calls, match_outputs(calls), "first")
    return {side: (arguments[side], cotangents[side]) for side in SIDES}


def shares(
    runner: SubmoduleRunner,
    sides: Sides,
    paths: Paths,
    whole: dict[Side, Call],
    steps: Sequence[PairedCall],
    copies: int,
) -> list[float]:
    """Return the share of its allowance that the code in front of each step takes, and that of the outputs, last.

    The outputs of all submodules are held, rounded to the working precision, so that only the module's own code rounds;
    `copies` of them are tried, slightly moved.
    """
    groups = match_inputs(whole)
    ends = [*({side: step.calls[side].arguments.leaves for side in SIDES} for step in steps)]
    ends.append({side: whole[side].outputs for side in SIDES})
    matched = [*(match_leaves(one["first"], one["second"]) for one in ends[:-1]), match_outputs(whole)]
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


def _taken(run: tuple[list[Array], Sequence[Call]], steps: Sequence[PairedCall], side: Side) -> list[Sequence[Array]]:
    """Return the inputs of every step in one run, and the outputs."""
    outputs, calls = run
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.path, []).append(call)
    inputs: list[Sequence[Array]] = []
    for step in steps:
        own = step.calls[side]
        number = [one.calls[side] for one in steps if one.calls[side].path == own.path].index(own)
        inputs.append(by_path[own.path][number].arguments.leaves)
    return [*inputs, outputs]


def _substitutes(steps: Sequence[PairedCall], side: Side, copy: int, dtype: str) -> Mapping[str, list[Substitute]]:
    substitutes: dict[str, list[Substitute]] = {}
    for number, step in enumerate(steps):
        call = step.calls[side]
        outputs: list[Array | None] = [None] * len(call.outputs)
        for group in outputs_of(step.calls) or ():
            value = group.given(side, _value(group, step, copy, number, dtype))
            for position in group.places(side):
                outputs[position] = value
        substitutes.setdefault(call.path, []).append(Substitute(outputs, [None] * len(call.arguments.leaves)))
    return substitutes


def _value(group: LeafGroup, step: PairedCall, copy: int, number: int, dtype: str) -> Array:
    """Return a submodule's output on the first side, moved slightly for each copy, in the working precision."""
    value = group.value("first", step.calls["first"].outputs)
    if copy:
        random = np.random.default_rng([copy, number, group.first[0]])
        value = value * (1.0 + 2.0**-10 * random.normal(size=value.shape))
    return in_dtype(value, dtype)
