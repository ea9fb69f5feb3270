"""Find where a side computes or returns a wider float dtype than its inputs and weights have.

Comes in: the calls of one run in the side's own precision, with dtypes alone. Goes out: the deepest submodules that
widen. A call widens if an output is wider than all of its float inputs and weights. That is a leak where the wider
numbers go on: to the outputs of the whole, or to layers with narrower weights. Where the code around casts them back
before any such layer, as around a norm or a softmax in float32, it is intended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..results.findings import DtypeLeak
from ..sides.arrays import class_of, width_of
from ..sides.subject import DtypeCall

MAX_LEAKS = 3
"""Most leaks that are reported for a side: after the first one, everything is wide."""


@dataclasses.dataclass(frozen=True)
class _Node:
    """A call, the dtypes of all weights of its submodule, and the calls that its code makes, in order."""

    call: DtypeCall
    weights: tuple[str, ...]
    children: tuple[_Node, ...]

    @property
    def given(self) -> int:
        """Bytes of the widest float input; 0 without one."""
        return _width(self.call.inputs)

    @property
    def weight(self) -> int:
        """Bytes of the widest weight; 0 without weights."""
        return _width(self.weights)

    @property
    def returned(self) -> int:
        """Bytes of the widest float output; 0 without one."""
        return _width(self.call.outputs)

    @property
    def own(self) -> int:
        """Bytes of the widest of inputs and weights; 0 without either."""
        return max(self.given, self.weight)


def leaks_of(calls: Sequence[DtypeCall], weights: Mapping[str, Collection[str]], label: str) -> list[DtypeLeak]:
    """Return the leaks of one side, those of the outputs first.

    Args:
        calls: the calls of a run, the whole module's (path "") among them.
        weights: path of a submodule -> dtypes of the weights that it holds itself.
        label: the side's name in messages.
    """
    whole = next((call for call in calls if not call.path), None)
    if whole is None:
        return []
    root = _node(whole, [call for call in calls if call.path], weights)
    leaks = [*([_source(root, label)] if _widens(root) else []), *_inside(root, label)]
    by_path = {leak.path: leak for leak in reversed(leaks)}
    return [leak for leak in leaks if by_path.pop(leak.path, None) is not None][:MAX_LEAKS]


def _node(call: DtypeCall, inside: Sequence[DtypeCall], weights: Mapping[str, Collection[str]]) -> _Node:
    below = f"{call.path}." if call.path else ""
    dtypes = [dtype for path, own in weights.items() if f"{path}.".startswith(below) for dtype in own]
    children = []
    rest = sorted(inside, key=lambda each: each.start)
    while rest:
        first = rest[0]
        # Calls nest as intervals do: those that start before the first one ends are inside it.
        mine = [other for other in rest[1:] if other.start < first.end]
        rest = rest[1 + len(mine) :]
        children.append(_node(first, mine, weights))
    return _Node(call, tuple(dict.fromkeys(dtypes)), tuple(children))


def _widest(dtypes: Collection[str]) -> str:
    return max((dtype for dtype in dtypes if class_of(dtype) == "float"), key=width_of, default="")


def _width(dtypes: Collection[str]) -> int:
    widest = _widest(dtypes)
    return width_of(widest) if widest else 0


def _widens(node: _Node, around: int = 0) -> bool:
    """Return whether an output is wider than inputs and weights, or without these than those of the code around."""
    return node.returned > (node.own or around) > 0


def _users(node: _Node) -> list[_Node]:
    """Return the child layers that widen: inputs wider than weights and code around, outputs wider than that code."""
    return [
        child
        for child in node.children
        if 0 < child.weight < child.given and node.own < child.given and 0 < node.own < child.returned
    ]


def _wide_part(node: _Node, before: int) -> _Node | None:
    """Return the first part that widens and after which no layer gets narrow numbers, up to a position."""
    earlier = [child for child in node.children if child.call.end <= before]
    for part in (child for child in earlier if _widens(child, node.own)):
        later = [child for child in earlier if child.call.start >= part.call.end and child.weight and child.given]
        if all(child.given > node.own for child in later):
            return part
    return None


def _inside(node: _Node, label: str) -> Iterator[DtypeLeak]:
    """Yield the leaks in the code of a call that do not reach its outputs, and those inside its parts."""
    users = _users(node)
    # One layer that the code around gives wide numbers, and whose results it narrows, is intended, as a router is.
    if users and not _widens(node) and (len(users) > 1 or _wide_part(node, users[0].call.start) is not None):
        yield _source(node, label)
    for child in node.children:
        yield from _inside(child, label)


def _source(node: _Node, label: str) -> DtypeLeak:
    """Return the deepest place from which on a call's numbers are wide."""
    users = _users(node)
    before = _wide_part(node, users[0].call.start if users else node.call.end)
    if before is not None and before.own:
        return _source(before, label)
    own = _widest([*node.call.inputs, *node.weights])
    if before is not None:
        return DtypeLeak(label, before.call.path, "", own, _widest(before.call.outputs))
    if users:
        return DtypeLeak(label, node.call.path, users[0].call.path, own, _widest(users[0].call.outputs))
    return DtypeLeak(label, node.call.path, "", own, _widest(node.call.outputs))
