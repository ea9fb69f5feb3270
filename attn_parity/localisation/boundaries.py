"""Submodules that divide their work with the code around in another way than their counterparts do.

Such a pair differs on the same inputs, like a faulty one. So the module around it runs on the second side, once with
the outputs of the pair and once with those of the first side, while all others return the first side's: only with a
faulty pair does the rest agree with the latter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from ..pair import SIDES
from ..results.findings import Side
from ..sides.arrays import is_float
from ..sides.subject import Array, Call, ModuleFailedError, Substitute
from .between import PairedCall, next_of
from .leaves import LeafGroup, apart, fed, match_inputs, match_outputs, other_layouts, relative
from .narrowing import Limit, Narrowing, judgeable, same_call
from .sides import FAILURES, SubmoduleRunner
from .sources import ANSWERS, moved_by, outputs_of
from .tree import Node, Standing

Layout = Mapping[int, Sequence[LeafGroup]]
"""Position of a step -> how its outputs correspond."""

SAME_ROW = 1e-9
"""Relative difference below which sums over two rows are the same."""


class Boundaries:
    """Tells submodules at fault from those that divide their work with the code around in another way.

    Args:
        runner: runs submodules; None where there are recorded numbers alone.
        narrowing: finds the steps of a module.
        limit_of: see `Limit`.
    """

    def __init__(self, runner: SubmoduleRunner | None, narrowing: Narrowing, limit_of: Limit) -> None:
        self._runner, self._narrowing, self._limit_of = runner, narrowing, limit_of

    def unhealed(self, node: Node, bad: Sequence[Node]) -> list[Node]:
        """Leave out submodules that the code around makes up for: what gets their outputs next agrees again.

        Those that can run are left to `standing`.
        """
        if not node.calls or self._runner is not None:
            return list(bad)
        return self._not_made_up_for(node, bad)

    def _not_made_up_for(self, node: Node, bad: Sequence[Node]) -> list[Node]:
        """Return those whose outputs still differ where the code around hands them on."""
        steps = self._narrowing.steps(node, node.calls[0], "forward", loose=True)
        limit = self._limit_of(node, "forward")
        healed: dict[str, bool] = {}
        for step in steps:
            if not step.differs("outputs", limit):  # the other calls of one that is called more than once say more
                continue
            following = next_of(step, steps, node.calls[0])
            made_up_for = (
                following is not None
                # `is False`: None, where nothing can be compared, must not excuse it.
                and following.differs("inputs", limit) is False
                and (len(bad) > 1 or step.hands_on_to(following, limit))
            )
            healed[step.path] = healed.get(step.path, True) and made_up_for
        return [child for child in bad if not healed.get(child.path or "", False)]

    def standing(self, node: Node, child: Node) -> Standing:
        """Return the standing of a submodule that differs, in a module that differs as well."""
        standing = self._among_others(node, child) if self._runner is not None else "shared behind"
        if standing is None:
            return "own" if not node.calls or self._not_made_up_for(node, [child]) else "front"
        if standing == "shared behind" and not child.children:  # a layer may be both: a fault in it is likelier
            return "own"
        if standing != "shared behind" or (self._runner is not None and not self._narrowing.ends_in_a_part(child)):
            return standing
        # Its counterpart may return what a part of it does, and then nothing but what is behind that part is left.
        is_right = self._narrowing.ends_in_a_part(child) and any(self._narrowing.behind_a_part(node, child))
        return "behind" if is_right else "own"

    def _among_others(self, node: Node, child: Node) -> Standing | None:
        """Return the standing by runs with other outputs; None where there are none."""
        limit = self._limit_of(node, "forward")
        for calls, trial in zip(node.calls, node.trials, strict=False):
            if self._runner is None or node.refed or trial.forward is None or trial.forward <= limit:
                continue
            parts = list(self._parts(node, child))
            steps = self._narrowing.steps(node, calls, "forward", parts=parts)
            different = {part.path for part in parts if part.is_no_unit or (part.forward or 0.0) > limit}
            if any(step.path == child.path for step in steps):
                try:
                    return _Surroundings(self._runner, node, calls, steps, limit).standing(child.path or "", different)
                except FAILURES:
                    continue
        return None

    def _parts(self, node: Node, child: Node) -> Iterator[Node]:
        """Yield the nearest judged submodules, and of others that differ those inside them."""
        limit = self._limit_of(node, "forward")
        for part in judgeable(node):
            is_other = part is not child and (part.forward or 0.0) > limit
            inner = list(self._parts(part, child)) if is_other else []
            yield from inner or [part]


class _Surroundings:
    """One call of a module on the second side, in which submodules return the first side's numbers.

    Args:
        runner: runs submodules.
        node: the module.
        calls: its call on each side.
        steps: the calls of submodules in it, fed the same.
        limit: largest relative difference that is allowed.
    """

    def __init__(
        self, runner: SubmoduleRunner, node: Node, calls: dict[Side, Call], steps: Sequence[PairedCall], limit: float
    ) -> None:
        self._runner, self._path, self._calls, self._steps = runner, node.paths["second"], calls, steps
        self._limit = limit

    def standing(self, path: str, different: Collection[str | None]) -> Standing:
        """Return the standing of a submodule that differs.

        Args:
            path: the submodule.
            different: paths of all that differ, which keep their own results: other code may make up for them.
        """
        own = [i for i, step in enumerate(self._steps) if step.path == path]
        others = [i for i, step in enumerate(self._steps) if i not in own and step.path in different]
        same = [i for i in range(len(self._steps)) if i not in own and i not in others]
        rest = {i: outputs_of(self._steps[i].calls) or () for i in same}
        free = self._run(rest)
        returned = {i: free[i].calls["second"].outputs for i in others}  # so that only what takes them directly changes
        is_comparable = all(match_outputs(self._steps[i].calls) for i in own)
        replaced, takes = free, list[int]()
        for layout in self._layouts(own) if is_comparable else [dict[int, Sequence[LeafGroup]]()]:
            replaced = self._run({**rest, **layout}, () if is_comparable else own, returned)
            takes = [i for i in range(len(free)) if self._is_moved(free[i], replaced[i])]
            if not any(self._differs(replaced[i]) for i in takes):
                break
        is_made_up_for = all(self._differs(free[i]) is False for i in takes)
        if not is_comparable:
            are_rows = all(_are_among(*(self._steps[i].calls[side].arguments.leaves for side in SIDES)) for i in own)
            return "front" if is_made_up_for else "own" if are_rows else "shared in front"
        gets_others = any(self._differs(replaced[i]) for i in own[:1])  # what later calls get has passed through others
        if all(free[i].differs("outputs", self._limit) is False for i in own):
            return "front" if gets_others else "own"
        if is_made_up_for:
            return "front" if gets_others else "behind"
        if not gets_others:
            if others and any(self._differs(replaced[i]) for i in takes):  # it may be the others that differ there
                replaced = self._run({**rest, **layout, **{i: match_outputs(self._steps[i].calls) for i in others}})
            return "shared behind" if any(self._differs(replaced[i]) for i in takes) else "own"
        fed_alike = self._run(rest, returned={i: self._fed(self._steps[i].calls) for i in own})
        return "shared in front" if any(self._differs(fed_alike[i]) for i in takes) else "behind"

    def _fed(self, calls: dict[Side, Call]) -> Sequence[Array]:
        """Return the outputs of a submodule on the second side, fed the first side's numbers."""
        arguments = fed(calls, match_inputs(calls), "first")["second"]
        return self._runner.run("second", calls["second"].path, arguments).outputs

    def _layouts(self, own: Sequence[int]) -> Iterator[Layout]:
        """Yield the ways in which a submodule's outputs may correspond, the likeliest first."""
        likeliest = {i: match_outputs(self._steps[i].calls) for i in own}
        yield likeliest
        if len(own) == 1:
            calls = self._steps[own[0]].calls
            others = other_layouts(calls["first"].outputs, calls["second"].outputs, likeliest[own[0]])
            yield from ({own[0]: groups} for groups in others)

    def _run(
        self, layout: Layout, moved: Sequence[int] = (), returned: Mapping[int, Sequence[Array]] | None = None
    ) -> list[PairedCall]:
        """Run with the first side's numbers for the outputs of some steps; return all steps, the module last.

        Args:
            layout: the correspondence of outputs.
            moved: positions of steps with other outputs than their own.
            returned: position of a step -> the outputs that replace those of the run.

        Raises:
            ModuleFailedError: it calls other submodules then.
        """
        substitutes: dict[str, list[Substitute]] = {}
        for i, step in enumerate(self._steps):
            call = step.calls["second"]
            outputs: list[Array | None] = [None] * len(call.outputs)
            if i in moved:
                outputs = [moved_by(leaf, i) if is_float(leaf) else None for leaf in call.outputs]
            if returned is not None and i in returned:
                outputs = [leaf if is_float(leaf) else None for leaf in returned[i]]
            for group in layout.get(i, ()):
                value = group.given("second", group.value("first", step.calls["first"].outputs))
                for position in group.second:
                    outputs[position] = value
            substitutes.setdefault(call.path, []).append(Substitute(outputs, [None] * len(call.arguments.leaves)))
        arguments, _ = same_call(self._calls)["second"]
        results, calls = self._runner.substituted("second", self._path, arguments, substitutes)
        by_path: dict[str, list[Call]] = {}
        for call in calls:
            by_path.setdefault(call.path, []).append(call)
        if any(len(by_path.get(path, ())) != len(same) for path, same in substitutes.items()):
            raise ModuleFailedError("it calls other submodules")
        inner = {path: iter(same) for path, same in by_path.items()}
        own_calls = [{**step.calls, "second": next(inner[step.calls["second"].path])} for step in self._steps]
        whole: dict[Side, Call] = {**self._calls, "second": dataclasses.replace(self._calls["second"], outputs=results)}
        steps = [dataclasses.replace(step, calls=calls) for step, calls in zip(self._steps, own_calls, strict=True)]
        return [*steps, PairedCall(self._calls["first"].path, whole)]

    def _differs(self, end: PairedCall) -> bool | None:
        """Return whether a step gets other numbers than on the first side, or the module returns others."""
        if not self._is_whole(end):
            return end.differs("inputs", self._limit)
        distance = apart(end.calls, match_outputs(end.calls), "outputs")
        return None if distance is None else distance > self._limit

    def _is_moved(self, before: PairedCall, after: PairedCall) -> bool:
        """Return whether a step gets other numbers in two runs of the second side, or the module returns others."""
        pair = [
            end.calls["second"].outputs if self._is_whole(end) else end.calls["second"].arguments.leaves
            for end in (before, after)
        ]
        return len(pair[0]) != len(pair[1]) or relative(list(zip(*pair, strict=True))) > ANSWERS

    def _is_whole(self, end: PairedCall) -> bool:
        return end.calls["first"] is self._calls["first"]


def _are_among(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Return whether the rows of one side's only array are among the other's, or zeros."""
    floats = [[leaf for leaf in leaves if is_float(leaf) and leaf.size] for leaves in (first, second)]
    if [len(leaves) for leaves in floats] != [1, 1] or floats[0][0].shape[-1:] != floats[1][0].shape[-1:]:
        return False
    few, many = sorted((leaf.reshape(-1, leaf.shape[-1]) for (leaf,) in floats), key=len)
    direction = np.random.default_rng(5).normal(size=few.shape[-1])
    wanted, numbers = few @ direction, np.sort(np.append(many @ direction, 0.0))
    above = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    apart_by = np.minimum(np.abs(wanted - numbers[above]), np.abs(wanted - numbers[np.maximum(above - 1, 0)]))
    return bool(apart_by.max() <= SAME_ROW * max(float(np.abs(numbers).max()), 1e-300))
