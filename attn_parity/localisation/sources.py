"""Find the calls that feed a piece of code: move the outputs of one while all others keep theirs.

With the outputs of every submodule fixed, only the module's own code still computes. A call feeds the input in question
directly if moving its outputs changes that input; all others are excluded. If the code adds terms from several calls,
the term that responds differently on the two sides is at fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..pair import SIDES
from ..results.findings import Side, shown
from ..sides.arrays import is_float
from ..sides.subject import Arguments, Array, Call, Substitute
from .between import PairedCall
from .leaves import LeafGroup, distance, fed, match_inputs, match_leaves, match_outputs, relative
from .sides import FAILURES, SubmoduleRunner
from .trials.forcing import Paths

INPUTS = -1
"""Stands for the module's own inputs among the positions of its calls."""

WORK = 1 << 26
"""Elements of outputs and weights in all runs of one search: the number of runs follows from the size of one."""

FEWEST, MOST = 3, 96
"""Bounds of the number of runs on each side."""

MAX_SOURCES = 6
"""Most sources whose terms are separated; each costs two runs on each side."""

ANSWERS = 1e-12
"""Relative change of an input above which it depends on the moved outputs; float64 gives the same bits otherwise."""

ADDS_UP = 1e-9
"""Relative difference below which two answers are the same, or add up to a third."""


class _OutOfRunsError(Exception):
    """More runs are needed than the size of the module allows."""


class Sources:
    """Looks for the calls that feed the inputs of one step, or the module's outputs.

    Args:
        runner: runs submodules.
        paths: the module, by side.
        whole: its call on each side, given the same inputs.
        steps: the calls in it, in order of execution.
        target: the step in question; None for the module's own outputs.
        limit: largest relative difference that is allowed.
        size: elements of outputs and weights of one run.
    """

    def __init__(
        self,
        runner: SubmoduleRunner,
        paths: Paths,
        whole: dict[Side, Call],
        steps: Sequence[PairedCall],
        target: PairedCall | None,
        limit: float,
        size: int,
    ):
        self._runner, self._paths, self._whole = runner, paths, whole
        self._steps, self._target, self._limit = steps, target, limit
        self._held = [outputs_of(step.calls) for step in steps]
        self._left = dict.fromkeys(SIDES, int(np.clip(WORK // size, FEWEST, MOST)))
        self._groups = (
            match_outputs(whole) if target is None else match_leaves(*(self._recorded(side) for side in SIDES))
        )
        self.feeds: list[int] = []  # all sources, those whose part is right among them
        self._wanted: dict[Side, list[int]] = {}
        self._bases: dict[Side, list[Array]] = {}

    def found(self) -> list[int] | None:
        """Return the positions of the calls not excluded, `INPUTS` among them; None if runs fail or run out."""
        try:
            return self._found()
        except (*FAILURES, _OutOfRunsError):
            return None

    def feeding(self) -> list[int]:
        """Return the positions of the calls that the target depends on, on the first side; nothing if unknown."""
        try:
            self._bases = {"first": self._run("first", ())}
            self._wanted = {"first": list(range(len(self._bases["first"])))}
            return sorted(self._feeding("first"))
        except (*FAILURES, _OutOfRunsError):
            return []

    def fed_by(self, position: int) -> list[PairedCall | None]:
        """Return the steps that take a call's output, None for the module's outputs; an empty list if unknown."""
        try:
            base, moved = (self._rerun("first", positions) for positions in ((), (position,)))
        except FAILURES:
            return []
        ends: list[PairedCall | None] = [*self._steps, None]
        results = ((step, self._taken("first", step, *base), self._taken("first", step, *moved)) for step in ends)
        return [
            step
            for step, one, two in results
            if len(one) != len(two) or relative([*zip(one, two, strict=True)]) > ANSWERS
        ]

    def agrees_plainly(self, position: int) -> bool:
        """Return whether the target agrees if a call returns the same numbers on both sides without axes exchanged."""
        try:
            ends = {side: self._taken(side, self._target, *self._rerun(side, (), plain=position)) for side in SIDES}
        except FAILURES:
            return False
        groups = match_outputs(self._whole) if self._target is None else match_leaves(ends["first"], ends["second"])
        return bool(groups) and not any(self._differ(one.value(side, ends[side]) for side in SIDES) for one in groups)

    def _found(self) -> list[int] | None:
        bases = self._bases = {side: self._run(side, ()) for side in SIDES}
        if any(len(bases[side]) != len(self._recorded(side)) for side in SIDES):
            return None
        apart = [one for one in self._groups if self._differ(one.value(side, bases[side]) for side in SIDES)]
        # Where none differs, whole numbers or the order of the inputs do, and every input is in question.
        self._wanted = {
            side: [i for one in apart for i in one.places(side)] or list(range(len(bases[side]))) for side in SIDES
        }
        sources = self.feeds = sorted({position for side in SIDES for position in self._feeding(side)})
        if not sources:
            return None
        if not apart or not 1 < len(sources) <= MAX_SOURCES or any(self._held[i] is None for i in sources if i >= 0):
            return sources
        self._groups = apart
        return self._at_fault(sources)

    def _differ(self, values: Iterable[Array]) -> bool:
        first_value, second_value = values
        return relative([(first_value, second_value)]) > self._limit

    # ---- who feeds it

    def _feeding(self, side: Side) -> list[int]:
        """Return the positions of the calls that the target depends on directly; the likeliest is tried separately."""
        before = [i for i, step in enumerate(self._steps) if step is not self._target]
        if self._target is not None:
            before = [i for i in before if self._steps[i].order < self._target.order] or before
        # By halves the others take few runs if none feeds it, and that is usual: a step mostly takes the output of the
        # one before.
        *rest, nearest = [INPUTS, *before]
        others = self._depends(side, rest)
        return [*others, *self._depends(side, [nearest])] or [INPUTS]  # no call feeds what the code makes up itself

    def _depends(self, side: Side, positions: Sequence[int]) -> list[int]:
        if not positions or not self._answers(side, positions):
            return []
        if len(positions) == 1:
            return list(positions)
        middle = len(positions) // 2
        return [*self._depends(side, positions[:middle]), *self._depends(side, positions[middle:])]

    def _answers(self, side: Side, positions: Sequence[int]) -> bool:
        moved, base = self._run(side, positions), self._bases[side]
        return len(moved) != len(base) or relative([(moved[i], base[i]) for i in self._wanted[side]]) > ANSWERS

    # ---- whose part differs

    def _at_fault(self, sources: list[int]) -> list[int]:
        """Return the sources whose part differs between the sides, where parts are added up; else all."""
        # A source adds its part to the others' if moving it alone, and moving all but it, change the target by as much
        # as moving all: then each part can be compared between the sides.
        together = self._changes(sources)
        alone = {one: self._changes([one]) for one in sources}
        others = {one: self._changes([i for i in sources if i != one]) for one in sources}
        added = [
            one
            for one in sources
            if all(_adds_up(alone[one][side], others[one][side], together[side]) for side in SIDES)
        ]
        if not added:
            return sources
        mixed = [one for one in sources if one not in added]
        answers = {one: _same(alone[one]["first"], alone[one]["second"]) for one in added}
        is_same = _same(*(_rest(together[side], [alone[one][side] for one in added]) for side in SIDES))
        guilty = [one for one in sources if (is_same if one in mixed else answers[one]) is False]
        return guilty or sources

    def _changes(self, positions: Sequence[int]) -> dict[Side, list[Array]]:
        """Return by how much the target changes on each side, with the first side's axes."""
        moved = {side: self._run(side, positions) for side in SIDES}
        return {
            side: [one.value(side, moved[side]) - one.value(side, self._bases[side]) for one in self._groups]
            for side in SIDES
        }

    # ---- running

    def _recorded(self, side: Side) -> list[Array]:
        call = self._whole if self._target is None else self._target.calls
        return list(call[side].outputs if self._target is None else call[side].arguments.leaves)

    def _run(self, side: Side, moved: Sequence[int]) -> list[Array]:
        """Return the target's numbers with the outputs of all calls held, some of them moved."""
        if not self._left[side]:
            raise _OutOfRunsError
        self._left[side] -= 1
        return self._taken(side, self._target, *self._rerun(side, moved))

    def _taken(self, side: Side, step: PairedCall | None, outputs: list[Array], calls: Sequence[Call]) -> list[Array]:
        """Return the inputs of a step in a run, or the outputs of the module; nothing if the step was not called."""
        if step is None:
            return outputs
        path = step.calls[side].path
        number = [one for one in self._steps if one.calls[side].path == path].index(step)
        same = [call for call in calls if call.path == path]
        return list(same[number].arguments.leaves) if number < len(same) else []

    def _rerun(self, side: Side, moved: Sequence[int], plain: int | None = None) -> tuple[list[Array], Sequence[Call]]:
        substitutes: dict[str, list[Substitute]] = {}
        for position, step in enumerate(self._steps):
            call = step.calls[side]
            outputs = self._outputs(position, side, is_moved=position in moved, is_plain=position == plain)
            added: list[Array | None] = [None] * len(call.arguments.leaves)
            substitutes.setdefault(call.path, []).append(Substitute(outputs, added))
        arguments = self._arguments(side, is_moved=INPUTS in moved)
        return self._runner.substituted(side, self._paths[side], arguments, substitutes)

    def _outputs(self, position: int, side: Side, *, is_moved: bool, is_plain: bool) -> list[Array | None]:
        call, groups = self._steps[position].calls[side], self._held[position]
        outputs: list[Array | None] = [leaf if is_float(leaf) else None for leaf in call.outputs]
        if groups is None:  # what it returns has no counterpart: each side keeps its own
            return [moved_by(leaf, position) if is_moved and leaf is not None else leaf for leaf in outputs]
        for group in groups:
            value = group.value("first", self._steps[position].calls["first"].outputs)
            value = moved_by(value, position) if is_moved else value
            value = value if is_plain else group.given(side, value)
            for i in group.places(side):
                outputs[i] = value
        return outputs

    def _arguments(self, side: Side, *, is_moved: bool) -> Arguments:
        arguments = fed(self._whole, match_inputs(self._whole), "first")
        if not is_moved:
            return arguments[side]
        leaves = list(arguments[side].leaves)
        for group in match_inputs(self._whole):
            value = moved_by(group.value("first", arguments["first"].leaves), INPUTS)
            for i in group.places(side):
                leaves[i] = group.given(side, value)
        # Other whole numbers of the same kind: each row's own, one further.
        leaves = [leaf if is_float(leaf) else np.roll(leaf, 1, -1) if leaf.ndim else leaf for leaf in leaves]
        return arguments[side].with_leaves(leaves)


def outputs_of(calls: Mapping[Side, Call]) -> list[LeafGroup] | None:
    """Return how the floating-point outputs of a call correspond; None if some have no counterpart."""
    outputs = [calls[side].outputs for side in SIDES]
    groups = match_outputs(calls)
    for side, leaves in zip(SIDES, outputs, strict=True):
        matched = {i for group in groups for i in group.places(side)}
        if any(is_float(leaf) and i not in matched for i, leaf in enumerate(leaves)):
            return None
    return groups


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Where the outputs of a call agree although one side returns more of them along an axis."""

    axis: int
    start: int
    longer: Side

    def words(self, labels: Mapping[Side, str]) -> str:
        """Return the finding as a message."""
        return f"{shown(labels[self.longer])} has the same numbers from position {self.start} of axis {self.axis} on"


def overlap(first: Array, second: Array, limit: float) -> Overlap | None:
    """Return where the longer of two arrays holds the shorter one; None if it does not."""
    if first.ndim != second.ndim or not first.ndim:
        return None
    for moved in range(first.ndim):
        for target in range(first.ndim):
            turned = np.moveaxis(second, moved, target)
            unequal = [axis for axis in range(first.ndim) if first.shape[axis] != turned.shape[axis]]
            if len(unequal) != 1:
                continue
            (axis,) = unequal
            longer: Side = "first" if first.shape[axis] > turned.shape[axis] else "second"
            long, short = (first, turned) if longer == "first" else (turned, first)
            size = short.shape[axis]
            for start in range(long.shape[axis] - size + 1):
                if size and relative([(np.take(long, range(start, start + size), axis), short)]) <= limit:
                    return Overlap(axis, start, longer)
    return None


def moved_by(array: Array, seed: int) -> Array:
    """Return other numbers of the same size, the same ones for one seed."""
    random = np.random.default_rng([29, seed + 1]).normal(size=array.shape)
    scale = float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 0.0
    return np.asarray((array + 0.3 * (scale or 1.0) * random).astype(array.dtype))


def _same(first: Sequence[Array], second: Sequence[Array]) -> bool:
    return relative(list(zip(first, second, strict=True))) <= ADDS_UP


def _adds_up(addends: Sequence[Array], other: Sequence[Array], sums: Sequence[Array]) -> bool:
    return all(
        distance(a + b, whole) <= ADDS_UP * max(float(np.abs(whole).max(initial=0.0)), 1e-300)
        for a, b, whole in zip(addends, other, sums, strict=True)
    )


def _rest(whole: Sequence[Array], parts: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.asarray(one - sum(part[i] for part in parts)) for i, one in enumerate(whole)]


def edges(
    steps: Sequence[PairedCall], target: PairedCall | None, candidates: Sequence[int] | None, path: str
) -> list[tuple[str, str]]:
    """Return the candidate locations of the code at fault, the likeliest first: the call that began last.

    Args:
        steps: the calls in the module.
        target: see `Sources`.
        candidates: the positions of the calls that feed it; None for all that began before.
        path: the module; its path means its own inputs and outputs.
    """
    before = [i for i, step in enumerate(steps) if target is None or step.order < target.order]
    origins = [INPUTS, *before] if candidates is None else candidates
    after = path if target is None else target.path
    names = [path if i == INPUTS else steps[i].path for i in sorted(origins, reverse=True)]
    return [(name, after) for name in dict.fromkeys(names)]
