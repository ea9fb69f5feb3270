"""Find the first divergence of two modules by teacher forcing: each submodule gets the other side's activations.

Both sides run once, freely, and every call of every submodule is recorded with its inputs, outputs and the gradient
that reaches it. Then each submodule runs alone on the inputs of its counterpart, forward and backward, in both
directions. A submodule that differs on the same inputs is at fault, or a submodule inside it, or the code between
those. Without runnable modules, recorded results are searched by their inputs and outputs alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from ..hints import Evidence
from ..matching.submodule_pairs import SHOWN, alternatives, differing, pair_modules
from ..pair import SIDES, Pair
from ..results.findings import Candidate, Divergence, ModuleNode, Side, shown
from ..samples.sampling import Sample
from ..sides.subject import Call
from ..verdict.measures import TABLE_LIMIT
from .between import Direction, PairedCall
from .boundaries import Boundaries
from .feeding import calling_of, feeding_of, reshaped_before
from .narrowing import SMALL_PART, Narrowed, Narrowing
from .sides import FAILURES, FreshRuns, Sides, SubmoduleRunner, calls_of, recorded_again, sides_of
from .tree import Node, Standing, build, difference, nearest, walk
from .trials.changed_operations import ChangedOperations, Trial
from .trials.forcing import CallTrial, Paths, compare_freely, evidence_between, evidence_of, force
from .trials.weighing import explained, rounding, weigh

LIMIT = 1e-11
"""Largest relative difference allowed for a submodule run alone in float64 on the same inputs."""

MOST_OTHERS = 3
"""Most further calls of a submodule that a hint has to hold for."""

CAUSE = 1e-4
"""Least part of the whole module's difference that can have caused it; less is rounding in an ill-conditioned part."""

MAX_NODES = 64
"""Number of submodules up to which all are tried; with more, only those inside a faulty one."""

SURE = 1e-6
"""A larger difference in float64 is never rounding."""

Aim = Literal["meaning", "precision"]


@dataclasses.dataclass(frozen=True)
class Localisation:
    """The module tree, the first divergence in it, and the numbers there; None if no submodule shows any."""

    tree: ModuleNode
    divergence: Divergence | None
    evidence: Evidence | None = None


def find(
    pair: Pair,
    sample: Sample,
    aim: Aim = "meaning",
    allowed: float | None = 0.0,
    *,
    outputs_agree: bool = False,
    fresh: Callable[[], Sample] | None = None,
) -> Localisation:
    """Return the module tree of a pair, the first divergence, and the values of both sides there.

    Args:
        pair: the two sides, paired.
        sample: numbers on which they differ.
        aim: ``meaning`` searches in float64, ``precision`` searches for the submodule that loses more than its share.
        allowed: relative difference that tables in float32 explain; None excuses neither tables nor literals.
        outputs_agree: the outputs are equal by the verdict, so a fault in the gradients comes first.
        fresh: draws another sample, on which a hint has to hold as well.
    """
    sides = sides_of(pair, sample)
    if fresh is not None:
        draw = fresh
        sides = dataclasses.replace(sides, fresh=lambda: sides_of(pair, draw()))
    result = find_on(sides, aim, allowed, outputs_agree=outputs_agree)
    if result.divergence is None and allowed is not None:  # each part alone is excused, and the whole is not
        result = find_on(sides, aim, None, outputs_agree=outputs_agree)
    return result


def find_on(sides: Sides, aim: Aim, allowed: float | None = 0.0, *, outputs_agree: bool = False) -> Localisation:
    """Return the module tree, the first divergence and its values for two subjects that run; see `find`."""
    runner = SubmoduleRunner(sides)
    calls, problems = calls_of(sides, runner)
    aim = "precision" if sides.lacks else aim
    location = find_in_calls(sides, calls, runner, aim, allowed, outputs_agree=outputs_agree)
    if problems:
        message = "; ".join([*problems, location.tree.message]).strip("; ")
        location = dataclasses.replace(location, tree=dataclasses.replace(location.tree, message=message))
    return location


def find_in_calls(
    sides: Sides,
    calls: Mapping[Side, Sequence[Call]],
    runner: SubmoduleRunner | None = None,
    aim: Aim = "meaning",
    allowed: float | None = 0.0,
    *,
    outputs_agree: bool = False,
) -> Localisation:
    """Like `find`, for recorded calls; without a runner only the recorded numbers are compared.

    Args:
        sides: the pair.
        calls: side -> all calls, the whole module's (path "") among them.
        runner: runs submodules alone.
        aim: see `find`.
        allowed: see `find`.
        outputs_agree: see `find`.
    """
    search = _Search(sides, calls, runner, aim, allowed)
    return search.found(("backward", "forward") if outputs_agree else ("forward", "backward"))


class _Search:
    def __init__(
        self,
        sides: Sides,
        calls: Mapping[Side, Sequence[Call]],
        runner: SubmoduleRunner | None,
        aim: Aim,
        allowed: float | None,
    ):
        self.sides, self.calls, self.runner, self.aim, self.allowed = sides, calls, runner, aim, allowed
        self.least = LIMIT
        self.enough = 1.0
        self.limits = {"forward": self._limit(None), "backward": self._limit(None)}
        first, second = (sides.subjects[side].modules() for side in SIDES)
        called = {side: {call.path: [leaf.size for leaf in call.outputs] for call in calls[side]} for side in SIDES}
        self.pairs = pair_modules(sides.pairing.matches, first, second, called)
        self.others = alternatives(sides.pairing.matches, first, second)
        self.root = build(self.pairs, {"first": first, "second": second}, calls, sides.labels)
        self.narrowing = Narrowing(sides, calls, runner, self._limit_of)
        self.boundaries = Boundaries(runner, self.narrowing, self._limit_of)

    def found(self, directions: Sequence[Direction]) -> Localisation:
        """Try every pair (for precision: along the way down), and follow the first that is at fault to the bottom."""
        self._try_all()
        # Only the whole module decides whether there is a fault: a submodule may differ where the code around makes up
        # for it.
        direction = next((one for one in directions if self._guilty(self.root, one)), None) or self._lossy()
        if direction is None:
            return self._found_in_whole_numbers()
        node = parent = self.root
        reshaped: Node | None = None
        calling: list[Candidate] = []
        while (child := self._worst_child(node, direction)) is not None:
            reshaped = reshaped_before(node, child) if direction == "forward" and self.aim == "meaning" else None
            if reshaped is not None:
                break
            parent, node = node, child
            if direction == "forward" and self.aim == "meaning" and (calling := calling_of(parent, node)):
                break
        if reshaped is not None and child is not None:
            places = (reshaped, child)
            code = Narrowed(tuple(Candidate(place.paths["first"], place.paths["second"]) for place in places))
            node = reshaped
        elif self.aim == "meaning":
            code = Narrowed() if calling else self.narrowing.narrowed(node, direction)
            feeding = calling or feeding_of(node, code.candidates)
            code = dataclasses.replace(code, candidates=(*feeding, *code.candidates))
        else:
            code = self.narrowing.losing(node, self.enough)
        for visited in walk(self.root):
            visited.message = "; ".join(
                filter(None, [*(self._settings(visited) if visited is node else ()), self._told(visited)])
            )
        candidates = code.candidates or (Candidate(node.path or "", node.second_path or ""),)
        if direction == "forward" and self.aim == "meaning" and not code.candidates:
            candidates = (*candidates, *self.narrowing.behind_a_part(parent, node))
        likeliest = candidates[0]
        first = next((visited for visited in walk(self.root) if visited.path == likeliest.path), node)
        first.first = True
        divergence = Divergence(
            likeliest.path,
            likeliest.second_path,
            direction,
            node.message,
            likeliest.between,
            candidates=candidates,
        )
        is_outside = bool(calling) and likeliest.between is not None
        evidence = None if is_outside else self._evidence(node, direction, code.chain, code.steps)
        return Localisation(self.root.frozen(self._is_different), divergence, evidence)

    def _lossy(self) -> Direction | None:
        """Return the direction that loses most precision, if this sample alone stays within the allowance; else None.

        The verdict pools all samples; half of the largest loss then counts as a loss.
        """
        used: dict[Direction, float] = {"forward": self.root.forward or 0.0, "backward": self.root.backward or 0.0}
        direction: Direction = max(used, key=lambda key: used[key])
        if self.aim == "meaning" or self.runner is None or not used[direction]:
            return None
        self.enough = 0.5 * used[direction]
        self.root.message = f"fed the same inputs, {used[direction]:.2g} of what may be lost is lost here ({direction})"
        return direction

    def _found_in_whole_numbers(self) -> Localisation:
        """Follow the first pair that was given the same and returned other integers or truth values, if any did."""
        node = self.root
        if self.aim == "precision" or not node.returns_other_numbers:
            return Localisation(node.frozen(self._is_different), None)
        while inner := [child for child in nearest(node) if child.returns_other_numbers]:
            node = min(inner, key=lambda child: child.order)
        node.first = True
        node.message = "fed the same inputs, the whole numbers or truth values returned are not the same"
        divergence = Divergence(node.path or "", node.second_path or "", "forward", node.message, None)
        tree = self.root.frozen(lambda visited: visited.returns_other_numbers or self._is_different(visited))
        return Localisation(tree, divergence, self._evidence(node, "forward", None, ()))

    # ---- trying

    def _try_all(self) -> None:
        self._try(self.root)
        if self.aim == "precision":
            return
        whole = {"forward": self.root.forward, "backward": self.root.backward}
        # The larger the difference of the whole, the less a rounding error inside can have caused it (`CAUSE`).
        self.limits = {key: self._limit(value) for key, value in whole.items()}
        if not any(self._guilty(self.root, key) for key in ("forward", "backward")):
            # The verdict found a difference, and this sample shows none above the limit: a cause may be smaller than
            # what it grows to on other samples.
            self.least = 0.01 * LIMIT
            self.limits = {key: self._limit(value) for key, value in whole.items()}
        total = sum(1 for _ in walk(self.root))
        self._try_below(self.root, total, iter(range(total)))

    def _try_below(self, node: Node, total: int, done: Iterator[int]) -> None:
        """Try the submodules; in a large tree, inside those that are at fault alone."""
        for child in node.children:
            self.sides.progress("looking for the first divergence", next(done, total), total)
            self._try(child)
            self._try_other_pairs(child)
            is_judged = child.forward is not None or child.backward is not None
            if total <= MAX_NODES or not is_judged or self._is_different(child):
                self._try_below(child, total, done)

    def _try(self, node: Node) -> None:
        """Run a pair alone, on the inputs of each side in turn; if that fails, compare the free runs."""
        for calls in node.calls:
            try:
                trial = self._trial(node, calls)
            except FAILURES as error:
                problem = f"could not be run by itself: {error}"
                free = CallTrial() if node.refed else compare_freely(calls, self._limit_of(node, "forward"))
                trial = dataclasses.replace(free, problem=problem)
            node.add(trial)

    def _trial(self, node: Node, calls: dict[Side, Call]) -> CallTrial:
        if self.runner is None:
            return CallTrial() if node.refed else compare_freely(calls, self.limits["forward"])
        if self.aim == "meaning":
            strict = node is self.root
            trial = force(self.runner, self.sides.pairing, node.paths, calls, self.limits["forward"], strict=strict)
            return dataclasses.replace(trial, error_in=None, error_out=None) if node.refed else trial
        used, worse, problem = weigh(self.runner, self.sides, node.paths, calls)
        loses = [
            f"{shown(self.sides.labels[worse[key]])} side loses {used[key]:.3g} times its share of precision ({key})"
            for key in used
            if used[key] > 1.0
        ]
        node.message = node.message or (f"fed the same inputs, the {loses[0]}" if loses else "")
        return CallTrial(forward=used.get("forward"), backward=used.get("backward"), problem=problem)

    def _try_other_pairs(self, node: Node) -> None:
        """If several nested modules hold the same weights, take the pair of them that agrees, if any."""
        if not self._guilty(node, "forward") or self.runner is None or not node.path:
            return
        for path, second_path in self.others.get(node.path, ()):
            other = next((one for one in walk(self.root) if one.path == path), None)
            mine = [one for one in self.calls["first"] if one.path == path][:1]
            its = [one for one in self.calls["second"] if one.path == second_path][:1]
            if other is None or not mine or not its or (path, second_path) == (node.path, node.second_path):
                continue
            calls: dict[Side, Call] = {"first": mine[0], "second": its[0]}
            paths: dict[Side, str] = {"first": path, "second": second_path}
            try:
                trial = force(self.runner, self.sides.pairing, paths, calls, self.limits["forward"])
            except FAILURES:
                continue
            if not trial.problem and (trial.forward or 0.0) <= self._limit_of(other, "forward"):
                node.part_from(other, second_path, calls)
                other.add(trial)
                return

    # ---- judging

    def _limit(self, whole: float | None) -> float:
        cause = CAUSE * whole if whole is not None and whole < float("inf") else 0.0
        return max(self.least, cause, (self.allowed or 0.0) if self.runner is None else 0.0)

    def _guilty(self, node: Node, direction: Direction) -> bool:
        """Return whether a pair differs by more than rounding."""
        error = node.error(direction)
        if error is None:
            return False
        if self.aim == "precision":
            return error > self.enough
        if error <= self.limits[direction]:
            return False
        if error <= TABLE_LIMIT and error <= self._limit_of(node, direction):  # more than that is never excused
            return False
        is_sure = node is self.root or self.runner is None or error > SURE
        return is_sure or error > self._rounding(node)

    def _rounding(self, node: Node) -> float:
        """Return the difference in float64 that the rounding errors of a pair in its own precision predict."""
        if node.rounding is None:
            assert self.runner is not None
            try:
                node.rounding = rounding(self.runner, self.sides, node.paths, node.calls[0])
            except FAILURES:
                node.rounding = 0.0
        return node.rounding

    def _limit_of(self, node: Node, direction: Direction) -> float:
        """Return the largest allowed difference of a pair on the same inputs: rounding, or tables inside it."""
        return max(self.limits[direction], self._explained(node)[direction])

    def _explained(self, node: Node) -> dict[str, float]:
        """Return the differences that tables in float32 inside a pair may cause alone."""
        if node.tables is None:
            node.tables = {"forward": 0.0, "backward": 0.0}
            if self.allowed is not None and self.runner is not None and node.calls:
                try:
                    node.tables = explained(self.runner, self.sides, node.paths, node.calls[0])
                except FAILURES:
                    node.tables = dict.fromkeys(node.tables, self.allowed)
        return node.tables

    def _is_different(self, node: Node) -> bool:
        return self._guilty(node, "forward") or self._guilty(node, "backward")

    def _worst_child(self, node: Node, direction: Direction) -> Node | None:
        """Return the first of the submodules at fault in the direction of the fault; None if all of them agree."""
        bad = [child for child in list(self._judged(node)) if self._guilty(child, direction)]
        if direction == "backward":
            # The gradients of one whose outputs differ do so for that alone: those with equal outputs are likelier.
            likelier = [child for child in bad if not self._guilty(child, "forward")]
            if bad and not likelier and self.aim == "meaning" and not self._guilty(node, "forward"):
                for child in bad:
                    child.standing = "front"  # what is around it makes up for it, as the module's outputs agree
                return self._worst_child(node, direction)
            bad = likelier or bad
        if self.aim == "precision":  # a neighbour may be a little beyond by chance, or by what it is fed
            shares = [child.error(direction) or 0.0 for child in bad]
            least = SMALL_PART * max(shares, default=0.0)
            bad = [child for child, used in zip(bad, shares, strict=True) if used >= least]
        if bad and direction == "forward" and self.aim == "meaning":
            return self._worst_unit(node, self.boundaries.unhealed(node, bad))
        # The first in the direction of the pass: gradients arrive from the last call.
        return (min if direction == "forward" else max)(bad, key=lambda child: child.order) if bad else None

    def _worst_unit(self, node: Node, bad: Sequence[Node]) -> Node | None:
        """Return the first faulty one of some differing submodules."""
        for child in sorted(bad, key=lambda child: child.order):
            standing = child.standing or self.boundaries.standing(node, child)
            if standing.startswith("shared") and not child.standing and self._is_at_fault_inside(child, standing):
                standing = "own"
            child.standing = standing
            if standing == "own":
                return child
            if child.is_no_unit:  # those inside it are submodules of the code around it
                return self._worst_child(node, "forward")
        return None

    def _is_at_fault_inside(self, child: Node, standing: Standing) -> bool:
        """Return whether a submodule differs elsewhere than in the code next to its own inputs, or to its outputs."""
        if self._worst_child(child, "forward") is not None:
            return True
        places = self.narrowing.narrowed(child, "forward").candidates
        end = ("shared in front", "shared behind").index(standing)
        return bool(places) and not any(place.between and place.between[end] == child.path for place in places)

    def _judged(self, node: Node) -> Iterator[Node]:
        """Yield the nearest judged submodules, descending into those that could not be judged."""
        for child in nearest(node):
            if self.aim == "precision" and child.forward is None and child.backward is None:
                self._try(child)
            if child.forward is None and child.backward is None:
                yield from self._judged(child)
            else:
                yield child

    # ---- telling

    def _told(self, node: Node) -> str:
        """Return a message on the difference of a pair."""
        if node.message or self.aim == "precision":
            return node.message
        if self._guilty(node, "forward") and node.forward is not None:
            how = "fed the same inputs, the" if self.runner is not None else "its inputs agree, and its"
            return f"{how} {difference('outputs differ', node.forward, 'value')}"
        if self._guilty(node, "backward") and node.backward is not None:
            return (
                "fed the same inputs and gradients, the outputs agree and "
                f"{difference(f'{node.worst} differs', node.backward, 'gradient')}"
            )
        return ""

    def _settings(self, node: Node) -> list[str]:
        """Return a message for each setting of a pair that differs."""
        if node.path is None or node.second_path is None:
            return []
        first, second = (self.sides.subjects[side].settings() for side in SIDES)
        where = node.path or getattr(self.sides.subjects["first"], "name", "")
        pairs, labels = {node.path: node.second_path}, self.sides.labels
        return differing(pairs, first, second, labels, {node.path: where}, SHOWN)

    def _evidence(
        self, node: Node, direction: Direction, between: tuple[str, str] | None, steps: Sequence[PairedCall]
    ) -> Evidence | None:
        """Return the numbers at the place of the fault; None if it can't be run once more."""
        if not node.calls:
            return None
        settings = [self.sides.subjects[side].settings() for side in SIDES]
        paths = node.paths
        setting = Evidence(
            paths["first"],
            paths["second"],
            direction,
            between,
            node.first_type,
            node.second_type,
            settings[0].get(paths["first"], {}),
            settings[1].get(paths["second"], {}),
            labels=(self.sides.labels["first"], self.sides.labels["second"]),
        )
        calls = self._worst_call(node, direction)
        others = [] if node.refed else [one for one in node.calls if one is not calls][:MOST_OTHERS]
        if self.runner is not None and self.aim == "meaning":
            changed = ChangedOperations(
                self.runner, self.sides, paths, calls, direction, others, lambda: self._fresh_trials(calls)
            )
            further = calls if between is None else self._further_call(node, direction, calls)
            again = functools.cache(lambda: self._fresh_evidence(node, further, setting))
            setting = dataclasses.replace(setting, changes=changed.hint, again=again)
        try:
            evidence = evidence_of(self.sides, self.runner, paths, calls, setting)
        except FAILURES:
            return setting
        if between is None:
            alike = [self._evidence_of(paths, one, setting) for one in others]
            return dataclasses.replace(evidence, others=list(filter(None, alike)))
        return dataclasses.replace(evidence_between(evidence, calls, steps), whole=evidence)

    def _evidence_of(self, paths: Paths, calls: dict[Side, Call], setting: Evidence) -> Evidence | None:
        """Return the numbers of a further call; None if it can't be run once more."""
        try:
            return evidence_of(self.sides, self.runner, paths, calls, setting)
        except FAILURES:
            return None

    @functools.cached_property
    def _again(self) -> FreshRuns | None:
        """The calls on a fresh sample."""
        return recorded_again(self.sides)

    def _fresh_trials(self, calls: Mapping[Side, Call]) -> list[Trial]:
        same = None if self._again is None else self._again.like(calls)
        return [] if self._again is None or same is None else [(self._again.runner, same)]

    def _fresh_evidence(self, node: Node, calls: Mapping[Side, Call], setting: Evidence) -> Evidence | None:
        """Return the numbers at the same place on a fresh sample; None without them."""
        again, trials = self._again, self._fresh_trials(calls)
        if again is None or not trials:
            return None
        ((runner, same),) = trials
        try:
            evidence = evidence_of(again.sides, runner, node.paths, dict(same), setting)
            if setting.between is None:
                return evidence
            narrowing = Narrowing(again.sides, again.calls, runner, self._limit_of)
            steps = narrowing.steps(node, dict(same), setting.direction)
        except FAILURES:
            return None
        return dataclasses.replace(evidence_between(evidence, dict(same), steps), whole=evidence)

    def _worst_call(self, node: Node, direction: Direction) -> dict[Side, Call]:
        errors = self._errors(node, direction)
        return node.calls[max(range(len(errors)), key=errors.__getitem__, default=0)]

    def _further_call(self, node: Node, direction: Direction, calls: dict[Side, Call]) -> dict[Side, Call]:
        """Return the worst other call that differs: what holds for a state of zeros alone does not hold for it."""
        errors = zip(self._errors(node, direction), node.calls, strict=False)
        rest = [(error, at) for at, (error, call) in enumerate(errors) if call is not calls and error > LIMIT]
        return node.calls[max(rest)[1]] if rest and not node.refed else calls

    def _errors(self, node: Node, direction: Direction) -> list[float]:
        return [(one.forward if direction == "forward" else one.backward) or 0.0 for one in node.trials]
