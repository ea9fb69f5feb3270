"""Change one operation of either side at the place of a fault, and run it again until both sides agree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ...hints.changes import MOST_FITTING, Budget, agree
from ...hints.rearranged import Rearranged, exchanged, reordered
from ...pair import SIDES
from ...results.findings import Side, shown
from ...sides.arrays import is_float
from ...sides.subject import Arguments, Array, Call, GradientSample, OutputSample, Run
from ..between import Direction
from ..leaves import fed, fed_cotangents, match_inputs, match_outputs
from ..sides import FAILURES, Sides, SubmoduleRunner
from .forcing import Paths, gradients_apart, gradients_of

Trial = tuple[SubmoduleRunner, Mapping[Side, Call]]
"""A call of the submodule on each side, and what runs it with the weights of its sample."""

KINDS: Mapping[Direction, tuple[bool, ...]] = {"forward": (False, True), "backward": (False,)}
"""Direction -> whether numbers in code are changed, in the order in which both sides are tried."""

AGREE = 1e-9
"""Largest difference of gradients that agree, relative to the largest of them."""

MOST_INPUTS = 4
"""Most inputs of which two are exchanged."""

RUN = 1 << 12
"""Elements whose time a run takes in addition for each weight."""

WIDER = 4.0
"""Factor of inputs with which a change has to fit as well: a bound that drawn numbers do not reach has no effect."""


@dataclasses.dataclass(frozen=True)
class ChangedOperations:
    """Runs one submodule of each side on the same inputs, with changes.

    Attributes:
        runner: runs submodules.
        sides: the pair.
        paths: the submodule on each side.
        calls: its call on each side.
        direction: of the fault: forward changes results, backward the gradients that operations pass.
        others: further calls of the submodule, on which a change has to make both sides agree as well.
        fresh: calls on a sample of other weights and inputs, on which it has to as well.
    """

    runner: SubmoduleRunner
    sides: Sides
    paths: Paths
    calls: Mapping[Side, Call]
    direction: Direction = "forward"
    others: Sequence[Mapping[Side, Call]] = ()
    fresh: Callable[[], Sequence[Trial]] = list

    def hint(self) -> str:
        """Return all changes of an operation with which both sides agree, and their lines; "" if none does.

        Either side may be the one at fault. Other numbers in the code are tried last: solved for, they may agree by
        chance.
        """
        for numbers in KINDS[self.direction]:
            ways = [way for side in reversed(SIDES) for way in self._ways(side, numbers=numbers)]
            if not (ways or numbers or self.direction == "backward"):
                ways = [*self._exchanged(), *self._rearranged()]
            if ways:
                where = f" in {self.paths['first']}" if self.paths["first"] else ""
                return f"with {', or with '.join(ways)} both sides agree{where}"
        return ""

    def _exchanged(self) -> list[str]:
        """Return the two inputs with which both sides agree if one side takes each for the other, for a message."""
        inputs = [group.second[0] for group in match_inputs(self.calls) if len(group.second) == 1][:MOST_INPUTS]
        leaves = self.calls["second"].arguments.leaves
        pairs = [pair for pair in itertools.combinations(inputs, 2) if leaves[pair[0]].shape == leaves[pair[1]].shape]
        label = shown(self.sides.labels["second"])
        return [f"inputs {i} and {j} exchanged in {label}" for i, j in pairs if self._agree_exchanged(i, j)]

    def _agree_exchanged(self, i: int, j: int) -> bool:
        with contextlib.suppress(*FAILURES):  # code may refuse the other input
            for runner, arguments, made in self._samples:
                leaves = list(arguments["second"].leaves)
                leaves[i], leaves[j] = leaves[j], leaves[i]
                run = runner.run("second", self.paths["second"], arguments["second"].with_leaves(leaves))
                if not agree(run.outputs, self._wanted("second", made)):
                    return False
            return True
        return False

    def _rearranged(self) -> list[str]:
        """Return the other orders of the second side's weights with which both sides agree, for a message."""
        path, label = self.paths["second"], shown(self.sides.labels["second"])
        weights = {
            name: one for name, one in self.runner.weights("second").items() if not path or name.startswith(f"{path}.")
        }
        sizes = (one.size for one in (*weights.values(), *self.calls["second"].arguments.leaves))
        budget, work = Budget(), RUN * len(weights) + sum(sizes)
        for ways in (exchanged(weights), reordered(weights), reordered(weights, joined=True)):
            fitting: list[str] = []
            for text, change in ways:
                if len(fitting) == MOST_FITTING or not budget.spend(work):
                    break
                if self._agree_rearranged(change):
                    fitting.append(f"{text} in {label}")
            if fitting:
                return fitting
        return []

    def _agree_rearranged(self, change: Rearranged) -> bool:
        with contextlib.suppress(*FAILURES):
            for runner, arguments, made in self._samples:
                weights = dict(change(runner.weights("second")))
                run = runner.run("second", self.paths["second"], arguments["second"], weights=weights)
                if not agree(run.outputs, self._wanted("second", made)):
                    return False
            return True
        return False

    def _ways(self, side: Side, *, numbers: bool) -> list[str]:
        """Return the changes of one side, for a message."""
        changes: list[tuple[str, str]] = []
        with contextlib.suppress(Exception):  # changed code may fail anyhow, and the verdict needs no hint
            changes = (
                self._changes(side, numbers=numbers) if self.direction == "forward" else self._gradient_changes(side)
            )
        label = shown(self.sides.labels[side])
        return [f"{text} in {label}{f' ({where})' if where else ''}" for text, where in changes]

    def _fed(self) -> Iterator[tuple[SubmoduleRunner, dict[Side, Arguments]]]:
        """Yield arguments of both sides: the call's, also times `WIDER`, and those of other calls and samples."""
        groups = match_inputs(self.calls)
        for times in (1.0, WIDER) if self.direction == "forward" else (1.0,):
            yield self.runner, fed(dict(self.calls), groups, "first", times=times)
        for runner, calls in (*((self.runner, calls) for calls in self.others), *self.fresh()):
            if self._is_alike(calls):
                yield runner, fed(dict(calls), groups, "first")

    @functools.cached_property
    def _samples(self) -> list[tuple[SubmoduleRunner, dict[Side, Arguments], dict[Side, Sequence[Array]]]]:
        """The runner, arguments and outputs of each sample; wider inputs only where the outputs are finite."""
        samples: list[tuple[SubmoduleRunner, dict[Side, Arguments], dict[Side, Sequence[Array]]]] = []
        for runner, arguments in self._fed():
            made: dict[Side, Sequence[Array]] = {
                side: runner.run(side, self.paths[side], arguments[side]).outputs for side in SIDES
            }
            if not samples or all(np.isfinite(each).all() for side in SIDES for each in made[side]):
                samples.append((runner, arguments, made))
        return samples

    def _is_alike(self, calls: Mapping[Side, Call]) -> bool:
        """Return whether a call has the arguments of the call that differs most, but for the numbers in arrays."""
        pairs = [(self.calls[side].arguments, calls[side].arguments) for side in SIDES]
        shapes = all([leaf.shape for leaf in mine.leaves] == [leaf.shape for leaf in its.leaves] for mine, its in pairs)
        bare = [[one.with_leaves(range(len(one.leaves))) for one in pair] for pair in pairs]
        return shapes and all(mine == its for mine, its in bare)

    def _changes(self, side: Side, *, numbers: bool) -> list[tuple[str, str]]:
        """Return the changes with which one side has the other's outputs."""
        samples = [
            OutputSample(runner.weights(side), arguments[side], self._wanted(side, made))
            for runner, arguments, made in self._samples
        ]
        if all(agree(made[side], self._wanted(side, made)) for *_, made in self._samples):
            return []  # any change that does nothing would do
        changes: list[tuple[str, str]] = self.sides.subjects[side].changes(
            samples, path=self.paths[side], numbers=numbers, has_literals=self._has_literals
        )
        return changes

    @functools.cached_property
    def _has_literals(self) -> bool:
        """Whether a side holds literals of float32 accuracy, by which the sides may differ with any change."""
        calls = dict(self.calls)
        arguments = fed(calls, match_inputs(calls), "first")
        cotangents = fed_cotangents(calls, match_outputs(calls), "first")
        runs = (
            self.runner.run_moved(side, self.paths[side], arguments[side], cotangents[side], 0, "literals")
            for side in SIDES
        )
        return any(run.moved for run in runs)

    def _wanted(self, side: Side, outputs: Mapping[Side, Sequence[Array]]) -> list[Array]:
        """Return the other side's outputs as this side would return them."""
        other: Side = "first" if side == "second" else "second"
        wanted = list(outputs[side])
        calls = {one: dataclasses.replace(self.calls[one], outputs=list(outputs[one])) for one in SIDES}
        for group in match_outputs(calls):
            value = group.value(other, outputs[other])
            for index in group.places(side):
                wanted[index] = group.given(side, value)
        if len(outputs["first"]) == len(outputs["second"]):  # whole numbers and truth values are matched by position
            for index, (mine, its) in enumerate(zip(outputs[side], outputs[other], strict=True)):
                if not is_float(mine) and not is_float(its) and mine.shape == its.shape:
                    wanted[index] = its
        return wanted

    def _gradient_changes(self, side: Side) -> list[tuple[str, str]]:
        """Return the changes with which one side has the other's gradients."""
        calls, pairing = dict(self.calls), self.sides.pairing
        groups, outputs = match_inputs(calls), match_outputs(calls)
        cotangents = fed_cotangents(calls, outputs, "first")
        samples, differing = [], set[str | int]()
        for runner, arguments in self._fed():
            runs = {one: runner.run(one, self.paths[one], arguments[one], cotangents[one]) for one in SIDES}

            apart = gradients_apart(gradients_of(pairing, runs, groups))

            def agrees(run: Run, runs: Mapping[Side, Run] = runs, count: int = len(apart)) -> bool:
                gaps = gradients_apart(gradients_of(pairing, {**runs, side: run}, groups))
                return len(gaps) == count and max(gaps.values(), default=0.0) <= AGREE

            samples.append(GradientSample(runner.weights(side), arguments[side], cotangents[side], agrees))
            leaves: dict[str, tuple[str | int, ...]] = {
                f"input {at}": group.places(side) for at, group in enumerate(groups)
            }
            leaves |= {match.first.name: (match.tensor(side).source,) for match in pairing.matches}
            differing.update(leaf for name, gap in apart.items() if gap > AGREE for leaf in leaves[name])
        if not differing:  # any change that does nothing would do
            return []
        changes: list[tuple[str, str]] = self.sides.subjects[side].gradient_changes(
            samples, differing, path=self.paths[side]
        )
        return changes
