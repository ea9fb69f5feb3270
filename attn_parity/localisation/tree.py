"""The tree of submodules: paired paths, their recorded calls, and the measures of each pair."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from ..pair import SIDES
from ..results.findings import ModuleNode, Side
from ..sides.subject import Call, Submodule
from .leaves import fed_alike, whole_numbers, whole_outputs
from .trials.forcing import CallTrial

MAX_CALLS = 3
"""Most calls of one submodule that are tried; one that is called in a loop repeats itself."""

# Order of a submodule that no call reached: behind all calls, of which a model has far fewer.
NEVER = 10**6

Standing = Literal["", "own", "behind", "front", "shared behind", "shared in front"]
"""The kind of a difference of a pair, fed the same; "" before a search.

``own``: a fault. ``behind`` and ``front``: other code makes up for it, behind the counterpart alone or in front of it
as well. ``shared behind`` and ``shared in front``: the code there has a part of the work, and either may be at fault.
"""


@dataclasses.dataclass
class Node:
    """A submodule of the first side with its counterpart, or a submodule that only the second side has."""

    path: str | None
    second_path: str | None
    first_type: str = ""
    second_type: str = ""
    order: int = 0
    message: str = ""
    refed: bool = False
    first: bool = False
    standing: Standing = ""
    rounding: float | None = None
    tables: dict[str, float] | None = None
    calls: list[dict[Side, Call]] = dataclasses.field(default_factory=list)
    trials: list[CallTrial] = dataclasses.field(default_factory=list)
    children: list[Node] = dataclasses.field(default_factory=list)

    @property
    def paths(self) -> dict[Side, str]:
        """The path on each side, "" without one."""
        return {"first": self.path or "", "second": self.second_path or ""}

    @property
    def forward(self) -> float | None:
        """The largest difference of the outputs, fed the same; None for a part of what other code does as well."""
        return None if self.is_no_unit else _largest(trial.forward for trial in self.trials)

    @property
    def backward(self) -> float | None:
        """The largest difference of the gradients, fed the same; None where `forward` is for that reason."""
        return None if self.is_no_unit else _largest(trial.backward for trial in self.trials)

    @property
    def is_no_unit(self) -> bool:
        """Whether it can be compared only together with the code around it."""
        return self.standing not in ("", "own", "behind")

    @property
    def exchanged(self) -> bool:
        """Whether it agrees in some call only when the sides exchange their inputs."""
        return any(trial.exchanged for trial in self.trials)

    @property
    def worst(self) -> str:
        """The gradient that differs the most."""
        return max(self.trials, key=lambda trial: trial.backward or 0.0, default=CallTrial()).worst

    @property
    def returns_other_numbers(self) -> bool:
        """Whether the sides were given the same whole numbers and truth values in some call, and returned others."""
        pairs = [[calls[side] for side in SIDES] for calls in self.calls]
        return any(whole_outputs(*both) and not whole_numbers(*(one.arguments for one in both)) for both in pairs)

    def error(self, direction: str) -> float | None:
        """Return the difference in one direction."""
        return self.forward if direction == "forward" else self.backward

    def add(self, trial: CallTrial) -> None:
        """Add the result of one more call."""
        self.trials.append(trial)
        self.message = self.message or trial.problem

    def part_from(self, other: Node, second_path: str, calls: dict[Side, Call]) -> None:
        """Give the counterpart to another node, which turned out to be it."""
        kind = self.second_type
        if other is not self:
            self.second_path, self.second_type, self.message = None, "", "no counterpart"
        self.calls, self.trials, self.rounding, self.tables = [], [], None, None
        other.second_path, other.second_type, other.message = second_path, kind, ""
        other.calls, other.trials = [calls], []

    def frozen(self, is_different: Callable[[Node], bool]) -> ModuleNode:
        """Return the node for a report."""
        verdict: Literal["different", "equal"] | None = None
        if self.forward is not None or self.backward is not None:
            verdict = "different" if is_different(self) else "equal"
        return ModuleNode(
            self.path,
            self.second_path,
            self.first_type,
            self.second_type,
            verdict,
            _largest(trial.error_in for trial in self.trials),
            _largest(trial.error_out for trial in self.trials),
            self.forward,
            self.backward,
            self.message,
            self.first,
            tuple(child.frozen(is_different) for child in sorted(self.children, key=lambda child: child.order)),
        )


def build(
    pairs: Mapping[str, str],
    modules: Mapping[Side, Sequence[Submodule]],
    calls: Mapping[Side, Sequence[Call]],
    labels: Mapping[Side, str],
) -> Node:
    """Return the tree of the first side's submodules with their counterparts' calls.

    Args:
        pairs: first path -> second path.
        modules: the submodules of each side, a parent before its children.
        calls: all calls of each side.
        labels: names of the sides.
    """
    calls_by_path = {side: _by_path(calls[side]) for side in SIDES}
    types = {module.path: module.type for module in modules["second"]}
    nodes: dict[str, Node] = {}
    for position, module in enumerate(modules["first"]):
        path, second_path = module.path, pairs.get(module.path)
        node = Node(path, second_path, module.type, types.get(second_path, "") if second_path is not None else "")
        mine = calls_by_path["first"].get(path, [])
        its = calls_by_path["second"].get(second_path, []) if second_path is not None else []
        node.order = mine[0].order if mine else NEVER + position
        node.message = _why_not(second_path, mine, its, labels)
        node.calls = [{"first": first, "second": second} for first, second in zip(mine, its, strict=False)]
        # The first calls and the last, which in a loop is furthest from them.
        node.calls = node.calls[: MAX_CALLS - 1] + node.calls[MAX_CALLS - 1 :][-1:]
        _feed_alike(node)
        nodes[path] = node
        if path:
            _parent(path, nodes).children.append(node)
    _add_second_only(nodes, pairs, modules["second"], calls_by_path["second"])
    _settle_order(nodes[""])
    return nodes[""]


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def difference(subject: str, error: float, largest: str) -> str:
    """Describe a difference relative to the largest value, or that entries are finite on one side alone.

    Args:
        subject: the tensors and their verb, such as "the outputs differ".
        error: the relative difference; infinite where such entries are.
        largest: the kind of the value.
    """
    by = "where one side alone is finite" if math.isinf(error) else f"by {error:.2g} of the largest {largest}"
    return f"{subject} {by}"


def nearest(node: Node) -> Iterator[Node]:
    """Yield the nearest nodes below that have calls on both sides."""
    for child in node.children:
        if child.calls:
            yield child
        else:
            yield from nearest(child)


def _feed_alike(node: Node) -> None:
    """Let both sides have the same rows, where one gives a module more of them than the other."""
    fed_calls = [fed_alike(calls) for calls in node.calls] if node.path else []
    if fed_calls and any(fed_calls):
        node.calls = [calls for calls in fed_calls if calls is not None]
        node.refed = True


def _by_path(calls: Sequence[Call]) -> dict[str, list[Call]]:
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.path, []).append(call)
    return by_path


def _why_not(second_path: str | None, mine: Sequence[Call], its: Sequence[Call], labels: Mapping[Side, str]) -> str:
    """Return why a pair is not run alone, or only for some of its calls; "" otherwise."""
    names = {side: label.replace("flax", "Flax") for side, label in labels.items()}
    if second_path is None:
        return "no counterpart"
    if not mine or not its:
        without = [names[side] for side, some in zip(SIDES, (mine, its), strict=True) if not some]
        return f"never called by itself in {' and '.join(without)}"
    if len(mine) != len(its):
        return f"called {len(mine)} times in {names['first']} and {len(its)} times in {names['second']}"
    return ""


def _parent(path: str, nodes: Mapping[str, Node]) -> Node:
    while path:
        path = path.rpartition(".")[0]
        if path in nodes:
            return nodes[path]
    return nodes[""]


def _add_second_only(
    nodes: Mapping[str, Node],
    pairs: Mapping[str, str],
    modules: Sequence[Submodule],
    calls: Mapping[str, Sequence[Call]],
) -> None:
    """Hang the modules that only the second side has below the nearest one that has a counterpart."""
    back = {second: first for first, second in pairs.items()}
    for module in modules:
        if module.path in back:
            continue
        parent = module.path
        while parent and parent not in back:
            parent = parent.rpartition(".")[0]
        some = calls.get(module.path, [])
        message = "no counterpart" if some else "no counterpart, never called by itself"
        node = Node(None, module.path, "", module.type, some[0].order if some else NEVER, message)
        nodes[back.get(parent, "")].children.append(node)


def _settle_order(node: Node) -> int:
    """Let a container that is never called itself stand where the first module in it does."""
    node.order = min([node.order, *map(_settle_order, node.children)])
    return node.order


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
