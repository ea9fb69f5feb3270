"""Change one operation of either side at the place of a fault, and run it again until both sides agree."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from ..pair import SIDES
from ..results.findings import Side, shown
from ..sides.subject import Arguments, Array, Call
from .forcing import Paths
from .leaves import fed, match_leaves, match_outputs
from .sides import FAILURES, Sides, SubmoduleRunner

COPIES = 2
"""Inputs on which a change has to make both sides agree."""


@dataclasses.dataclass(frozen=True)
class ChangedOperations:
    """Runs one submodule of each side on the same inputs, with changes.

    Attributes:
        runner: runs submodules.
        sides: the pair.
        paths: the submodule on each side.
        calls: its call on each side.
    """

    runner: SubmoduleRunner
    sides: Sides
    paths: Paths
    calls: Mapping[Side, Call]

    def hint(self) -> str:
        """Return the change of an operation with which both sides agree, and its line of code; "" if none does."""
        try:
            arguments = [self._arguments(copy) for copy in range(COPIES)]
            outputs = [
                {side: self.runner.run(side, self.paths[side], each[side]).outputs for side in SIDES}
                for each in arguments
            ]
        except FAILURES:
            return ""
        for side in reversed(SIDES):
            changes: list[tuple[str, str]] = []
            with contextlib.suppress(Exception):  # changed code may fail anyhow, and the verdict needs no hint
                samples = [
                    (each[side], self._wanted(side, made)) for each, made in zip(arguments, outputs, strict=True)
                ]
                subject, path = self.sides.subjects[side], self.paths[side]
                changes = subject.changes(self.runner.weights(side), samples, path=path)
            if changes:
                label = shown(self.sides.labels[side])
                ways = [f"{text} ({where})" if where else text for text, where in changes]
                return f"with {', or with '.join(ways)} in {label} both sides agree"
        return ""

    def _arguments(self, copy: int) -> dict[Side, Arguments]:
        calls = dict(self.calls)
        groups = match_leaves(*(calls[side].arguments.leaves for side in SIDES))
        return fed(calls, groups, "first", copy=copy)

    def _wanted(self, side: Side, outputs: Mapping[Side, Sequence[Array]]) -> list[Array]:
        """Return the other side's outputs as this side would return them."""
        other: Side = "first" if side == "second" else "second"
        wanted = list(outputs[side])
        calls = {one: dataclasses.replace(self.calls[one], outputs=list(outputs[one])) for one in SIDES}
        for group in match_outputs(calls):
            value = group.value(other, outputs[other])
            for index in group.places(side):
                wanted[index] = group.given(side, value)
        return wanted
