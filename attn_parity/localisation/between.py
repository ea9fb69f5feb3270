"""The code between submodules: which part of a module is at fault when all the submodules in it agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ..pair import SIDES
from ..results.findings import Side
from ..sides.subject import Array, Call
from .leaves import apart, got_apart, match_inputs, match_leaves, relative

Direction = Literal["forward", "backward"]

PARALLEL = 1e-9
"""By how much the cosine of two gradients may be below one if one is to be a multiple of the other."""


@dataclasses.dataclass(frozen=True)
class PairedCall:
    """One call of a submodule inside the module in question.

    Attributes:
        path: its path on the first side.
        calls: the call on each side.
        exchanged: whether it agrees, fed the same, only if the sides exchange integers, or the order of its inputs.
    """

    path: str
    calls: dict[Side, Call]
    exchanged: bool = False

    @property
    def order(self) -> int:
        """Return when it began on the first side."""
        return self.calls["first"].order

    def differs(self, what: str, limit: float) -> bool | None:
        """Return whether ``inputs``, ``outputs`` or ``cotangents`` differ between the sides; None if undetermined.

        Inputs that cannot be compared, as of a step that takes only integers, are equal if its outputs are.
        """
        outputs = match_leaves(*(self.calls[side].outputs for side in SIDES))
        if what != "inputs":
            distance = apart(self.calls, outputs, what)
            return None if distance is None else distance > limit
        if self.exchanged:
            return True
        groups = match_inputs(self.calls)
        distance = apart(self.calls, groups, what)
        if distance is None:
            after = apart(self.calls, outputs, "outputs")
            if after is not None and after <= limit:
                return False
            # An image that has its border on one side alone may still hold the same numbers.
            return True if self._are_images() and got_apart(self.calls, groups) else None
        return distance > limit

    def _are_images(self) -> bool:
        """Return whether each side gets an array of images alone, of other heights and widths."""
        leaves = [self.calls[side].arguments.leaves for side in SIDES]
        shapes = [one[0].shape for one in leaves if len(one) == 1 and one[0].ndim == 4]
        return len(shapes) == 2 and sum(map(int.__ne__, *shapes)) == 2

    def hands_on_to(self, following: PairedCall, limit: float) -> bool:
        """Return whether every differing output is an input of the following step, unchanged on either side."""
        for group in match_leaves(*(self.calls[side].outputs for side in SIDES)):
            first_value, second_value = (group.value(side, self.calls[side].outputs) for side in SIDES)
            if relative([(first_value, second_value)]) > limit and not any(
                is_among(self.calls[side].outputs[place], following.calls[side].arguments.leaves)
                for side in SIDES
                for place in group.places(side)
            ):
                return False
        return True


Gradients = Callable[[PairedCall | None], Mapping[Side, Sequence[Array | None]]]
"""Returns the gradients with respect to the inputs of a step, or of the module itself, by side."""


def calls_inside(calls: Sequence[Call], path: str, call: Call) -> list[Call]:
    """Return the calls that were made during one call of a module, from all calls of one side.

    A submodule that several modules share has its path in one of them only; the order of calls identifies it.
    """
    if not path:
        return [one for one in calls if one.path]
    own = [one for one in calls if one.path.startswith(f"{path}.") and one.order > call.order]
    after = min((one.order for one in calls if one.path == path and one.order > call.order), default=None)
    own = [one for one in own if after is None or one.order < after]
    last = max((one.order for one in own), default=call.order)
    return sorted((one for one in calls if call.order < one.order <= last), key=lambda inner: inner.order)


def steps_of(
    pairs: Mapping[str, str], calls: Mapping[Side, Sequence[Call]], exchanged: set[str], *, loose: bool = False
) -> list[PairedCall]:
    """Return the steps of paired submodules in order of execution; pairs with unequal numbers of calls have none.

    Args:
        pairs: first path -> second path of the nearest submodules.
        calls: the calls inside the module, by side.
        exchanged: first paths of those that agree only if the sides exchange their inputs.
        loose: pair the first calls of a submodule that is called more often on one side.
    """
    steps = []
    for path, second_path in pairs.items():
        mine = [one for one in calls["first"] if one.path == path]
        its = [one for one in calls["second"] if one.path == second_path]
        if loose or len(mine) == len(its):
            call_pairs = zip(mine, its, strict=False)
            steps += [PairedCall(path, {"first": one, "second": two}, path in exchanged) for one, two in call_pairs]
    return sorted(steps, key=lambda step: step.order)


def located(
    path: str,
    steps: Sequence[PairedCall],
    whole: dict[Side, Call],
    direction: Direction,
    limit: float,
    backward: Gradients,
) -> tuple[list[tuple[str, str]], bool]:
    """Return pairs of paths between which the code at fault lies, given that the module itself is at fault.

    Also returns whether there are no other places: a difference of gradients was seen to come through these.

    Args:
        path: the module; its path means its inputs (first) or its outputs (second).
        steps: the calls of its submodules, in order; the module was fed the same on both sides.
        whole: the call of the module.
        direction: of the fault.
        limit: largest difference that is allowed.
        backward: returns the gradients with respect to the inputs of a call, None for the module's own.
    """
    if not steps:
        return [], False
    if direction == "forward":
        between = _code_forward(path, steps, limit)
        return [] if between is None else [between], False
    return _code_backward(path, steps, whole, limit, backward)


def _code_forward(path: str, steps: Sequence[PairedCall], limit: float) -> tuple[str, str] | None:
    """Look for the first submodule that is given something else."""
    judged = [(step, differs) for step in steps if (differs := step.differs("inputs", limit)) is not None]
    if not judged:
        return None
    for position, (step, differs) in enumerate(judged):
        if differs:
            return (judged[position - 1][0].path if position else path), step.path
    return judged[-1][0].path, path


def _code_backward(
    path: str, steps: Sequence[PairedCall], whole: dict[Side, Call], limit: float, backward: Gradients
) -> tuple[list[tuple[str, str]], bool]:
    """Look for the last submodule whose gradient comes back different, then for the branch that it came through."""
    judged = [(step, differs) for step in steps if (differs := step.differs("cotangents", limit)) is not None]
    if not judged:
        return [], False
    bad = next((step for step, differs in reversed(judged) if differs), None)
    if bad is None:
        own = backward(None)
        gap = _gap(own["first"], own["second"])
        before, later = path, list(steps)
    else:
        groups = match_leaves(bad.calls["first"].outputs, bad.calls["second"].outputs)
        totals = {side: [one.total(side, bad.calls[side].cotangents) for one in groups] for side in SIDES}
        gap = _gap(totals["first"], totals["second"])
        before, later = bad.path, [step for step in steps if step.order > bad.order]
    if gap is None:
        return [], False
    branches = _branches(gap, path, before, steps, later, whole, backward)
    if branches:
        return branches, True
    return [(before, steps[0].path if bad is None else _next_of(bad, steps, whole, path))], False


def _branches(
    gap: Array,
    path: str,
    before: str,
    steps: Sequence[PairedCall],
    later: Sequence[PairedCall],
    whole: dict[Side, Call],
    backward: Gradients,
) -> list[tuple[str, str]]:
    """Return the branch that carried a difference of gradients, found as the one whose gradient it is a multiple of.

    The branch may be the gradient that a submodule sends back: then the code before it is at fault. Or the gradient
    that reaches a submodule whose output is added to a bypass: then the code behind it is at fault, or the bypass.
    """
    for step in later:
        if any(one is not None and _parallel(gap, one) for one in backward(step)["first"]):
            position = list(steps).index(step)
            return [(steps[position - 1].path if position else path, step.path), (before, step.path)]
    for step in later:
        if any(one is not None and _parallel(gap, one) for one in step.calls["first"].cotangents):
            after = _next_of(step, steps, whole, path)
            return [(step.path, after), (before, after)]
    return []


def _next_of(step: PairedCall, steps: Sequence[PairedCall], whole: dict[Side, Call], path: str) -> str:
    """Return the path of the first submodule that may take a step's output, else the module's own path (its end)."""
    following = next_of(step, steps, whole)
    return path if following is None else following.path


def next_of(step: PairedCall, steps: Sequence[PairedCall], whole: dict[Side, Call]) -> PairedCall | None:
    """Return the first later step that may take the output of this one; None if none does.

    A step whose inputs all existed before (the module's inputs, inputs and outputs of earlier submodules) is excluded,
    and so is one that takes only those and outputs of excluded steps: a parallel branch.
    """
    earlier = [one for one in steps if one.order <= step.order]
    arrays = list(whole["first"].arguments.leaves)
    for candidate in earlier:
        arrays += candidate.calls["first"].arguments.leaves
        arrays += candidate.calls["first"].outputs if candidate is not step else []
    for candidate in steps:
        if candidate.order > step.order:
            if not all(is_among(leaf, arrays) for leaf in candidate.calls["first"].arguments.leaves):
                return candidate
            arrays += candidate.calls["first"].outputs
    return None


def is_among(array: Array, arrays: Sequence[Array]) -> bool:
    """Return whether an array is one of some, perhaps reshaped."""
    return any(
        one.size == array.size and one.dtype == array.dtype and np.array_equal(one.reshape(-1), array.reshape(-1))
        for one in arrays
    )


def _gap(first: Sequence[Array | None], second: Sequence[Array | None]) -> Array | None:
    """Return the largest of the differences of some pairs."""
    gaps = [one - two for one, two in zip(first, second, strict=True) if one is not None and two is not None]
    return max(gaps, key=lambda gap: float(np.abs(gap).max(initial=0.0)), default=None)


def _parallel(first: Array, second: Array) -> bool:
    """Return whether one array is a multiple of the other."""
    if first.size != second.size or first.size < 2:
        return False
    a, b = first.reshape(-1).astype(np.float64), second.reshape(-1).astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return lengths > 0.0 and abs(float(a @ b)) > (1.0 - PARALLEL) * lengths
