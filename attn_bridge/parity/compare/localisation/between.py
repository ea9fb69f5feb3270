"""The code between submodules: which part of a module is at fault when all the submodules in it agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from ..subject import Call
from .leaves import apart, match_leaves
from .sides import SIDES, Side

Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a submodule inside the module in question.

    Attributes:
        path: its path on the first side.
        calls: the call on each side.
        innocent: whether it agrees when it is fed the same.
        exchanged: whether it does so only if the sides exchange integers, or the order of its inputs.
    """

    path: str
    calls: dict[Side, Call]
    innocent: bool = True
    exchanged: bool = False

    @property
    def order(self) -> int:
        """Return when it began on the first side."""
        return self.calls["first"].order

    def differs(self, what: str, limit: float) -> bool | None:
        """Tell whether its ``inputs`` or ``cotangents`` differ between the sides; None if that can't be told."""
        if what == "inputs":
            if self.exchanged:
                return True
            leaves = [self.calls[side].arguments.leaves for side in SIDES]
        else:
            leaves = [self.calls[side].outputs for side in SIDES]
        found = apart(self.calls, match_leaves(*leaves), what)
        return None if found is None else found > limit


def calls_inside(calls: Sequence[Call], path: str, call: Call) -> list[Call]:
    """Return the calls that were made during one call of a module, from all calls of one side.

    A submodule that several modules share has its path in one of them only; it is told by when it was called.
    """
    if not path:
        return [one for one in calls if one.path]
    own = [one for one in calls if one.path.startswith(f"{path}.") and one.order > call.order]
    after = min((one.order for one in calls if one.path == path and one.order > call.order), default=None)
    own = [one for one in own if after is None or one.order < after]
    last = max((one.order for one in own), default=call.order)
    return sorted((one for one in calls if call.order < one.order <= last), key=lambda one: one.order)


def steps_of(
    pairs: Mapping[str, str], calls: Mapping[Side, Sequence[Call]], innocent: Mapping[str, bool], exchanged: set[str]
) -> list[Step]:
    """Return the steps of paired submodules in order of execution; one called more often on one side has none.

    Args:
        pairs: first path -> second path of the nearest submodules.
        calls: the calls inside the module, by side.
        innocent: first path -> whether it agrees fed the same.
        exchanged: first paths of those that agree only if the sides exchange what they are fed.
    """
    found = []
    for path, second_path in pairs.items():
        mine = [one for one in calls["first"] if one.path == path]
        its = [one for one in calls["second"] if one.path == second_path]
        if len(mine) == len(its):
            both = zip(mine, its, strict=True)
            found += [
                Step(path, {"first": one, "second": two}, innocent.get(path, True), path in exchanged)
                for one, two in both
            ]
    return sorted(found, key=lambda step: step.order)


def code_between(path: str, steps: Sequence[Step], direction: Direction, limit: float) -> tuple[str, str] | None:
    """Return two paths between which the code at fault lies, given that the module itself is at fault.

    Args:
        path: the module; it stands for its own inputs (first) and outputs (second).
        steps: the calls of its submodules, in order; the module was fed the same on both sides.
        direction: of the fault.
        limit: largest difference that is none.
    """
    what = "inputs" if direction == "forward" else "cotangents"
    known = [(step, differs) for step in steps if (differs := step.differs(what, limit)) is not None]
    if not known:
        return None
    if direction == "forward":
        for position, (step, differs) in enumerate(known):
            if differs:
                return (known[position - 1][0].path if position else path), step.path
        return known[-1][0].path, path
    for position, (step, differs) in reversed(list(enumerate(known))):
        if differs:
            return step.path, (known[position + 1][0].path if position + 1 < len(known) else path)
    return path, known[0][0].path
