"""Submodules that get other arrays than their counterparts: the code in front of them makes these, and is the place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ..pair import SIDES
from ..results.findings import Candidate, Side
from ..samples.calls import is_mask
from ..sides.arrays import is_float
from ..sides.subject import Array, Call
from .between import is_among
from .leaves import LeafGroup, apart, got_apart, match_inputs, match_leaves, match_outputs
from .tree import Node, nearest, walk

SAME = 1e-9
"""Largest difference of outputs, relative to the largest value, that are the same."""


def reshaped_before(node: Node, bad: Node) -> Node | None:
    """Return the first submodule that turns the same inputs into other shapes, where these reach one at fault.

    The call after it and the one at fault get other shapes as well: the code between does not make up for them.
    """
    if not bad.calls or not _get_other_shapes(bad):
        return None
    inside = [inner for inner in walk(node) if inner is not node and inner.calls and inner.order <= bad.order]
    leaves = {
        id(leaf): leaf
        for leaf in (*inside, bad)
        if leaf is bad or not any(inner.calls for child in leaf.children for inner in walk(child))
    }
    for leaf, following in itertools.pairwise(sorted(leaves.values(), key=lambda leaf: leaf.order)):
        outputs = (call.outputs for call in leaf.calls[0].values())
        if _shaped_apart(*outputs) and not _get_other_shapes(leaf) and _get_other_shapes(following):
            return leaf
    return None


def calling_of(parent: Node, node: Node) -> list[Candidate]:
    """Return the code that calls a submodule, if it gives it an array where the other side gives another one.

    The submodule itself is a candidate as well: it may make of its array what other code makes for its counterpart.
    """
    if node is parent or not node.calls:
        return []
    groups = match_inputs(node.calls[0])
    is_padding = _pads_itself(node)
    is_turned = any(not group.turn.is_plain and not group.turn.moves_one_axis for group in groups)
    is_given_twice = any(_is_given_twice(calls, match_inputs(calls)) for calls in node.calls)
    if not (is_padding or is_turned or is_given_twice or _is_given_others(node, groups)):
        return []
    earlier = [child for child in nearest(parent) if child.calls and child.order < node.order]
    before = max(earlier, key=lambda child: child.order, default=parent)
    between = before.path or "", node.path or ""
    inside = Candidate(node.paths["first"], node.paths["second"])
    calling = Candidate(parent.paths["first"], parent.paths["second"], between)
    return [inside, calling] if is_padding else [calling, inside]


def _pads_itself(node: Node) -> bool:
    """Return whether a submodule without parts makes the same shapes of other ones: a side may pad in front of it."""
    has_parts = any(inner.calls for child in node.children for inner in walk(child))
    return not has_parts and _get_other_shapes(node) and not _returns_other_shapes(node)


def _is_given_others(node: Node, groups: Sequence[LeafGroup]) -> bool:
    """Return whether a submodule gets equal arrays and another one on each side, and uses that unchanged.

    A part of it gets the array unchanged on both sides, or no part is known.
    """
    calls = node.calls[0]
    others: dict[Side, list[Array]] = {}
    for side in SIDES:
        places = {place for group in groups for place in group.places(side)}
        leaves = enumerate(calls[side].arguments.leaves)
        others[side] = [leaf for i, leaf in leaves if i not in places and is_float(leaf) and not is_mask(leaf)]
    if not groups or not all(others.values()):
        return False
    inside = [inner for inner in walk(node) if inner is not node and inner.calls]
    # A part that was given the rows of one side on both has those alone.
    return not inside or any((any if inner.refed else all)(_get_some(inner.calls[0], others)) for inner in inside)


def _get_some(calls: Mapping[Side, Call], arrays: Mapping[Side, Sequence[Array]]) -> Iterator[bool]:
    """Yield for each side whether a call gets one of some arrays."""
    for side in SIDES:
        yield any(is_among(array, calls[side].arguments.leaves) for array in arrays[side])


def feeding_of(node: Node, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the code in front of the first other shapes, if a place is in a submodule that gets other numbers."""
    below = (inner for inner in walk(node) if inner is not node and inner.calls)
    ordered = sorted(below, key=lambda inner: inner.order)
    ends = [end for place in candidates[:1] for end in (place.path, *(place.between or ()))]
    inside = next((inner for inner in ordered if _holds_some(inner, ends) and _gets_other_numbers(inner)), None)
    if inside is None:
        return _lengthening(node, ordered, candidates)
    first = next(number for number, inner in enumerate(ordered) if inner is inside or _is_of_other_shapes(inner))
    before = ordered[first - 1].path if first else node.path
    between = before or "", ordered[first].path or ""
    return [Candidate(node.paths["first"], node.paths["second"], between)]


def _lengthening(node: Node, ordered: Sequence[Node], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the code in front of a submodule in the first place that gets more rows on one side, as more tokens."""
    orders = {inner.path: inner.order for inner in ordered}
    ends = [orders.get(end) for place in candidates[:1] for end in place.between or ()]
    if len(ends) != 2 or ends[1] is None:
        return []
    inside = [inner for inner in ordered if (ends[0] or -1) < inner.order < ends[1]]
    other = next((inner for inner in inside if inner.refed), None)
    if other is None:
        return []
    before = max((inner for inner in ordered if inner.order < other.order), key=lambda inner: inner.order, default=node)
    return [Candidate(node.paths["first"], node.paths["second"], (before.path or "", other.path or ""))]


def _returns_other_shapes(node: Node) -> bool:
    """Return whether the first call of a submodule returns arrays of other shapes on the two sides."""
    return _shaped_apart(*(call.outputs for call in node.calls[0].values()))


def _get_other_shapes(node: Node) -> bool:
    """Tell whether the first call of a submodule gets arrays of other shapes on the two sides."""
    return _shaped_apart(*(call.arguments.leaves for call in node.calls[0].values()))


def _holds_some(node: Node, paths: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{node.path}.") for path in paths)


def _gets_other_numbers(node: Node) -> bool:
    """Return whether a submodule gets other numbers than its counterpart, and not what comes to the same in it."""
    calls = node.calls[0]
    after = apart(calls, match_outputs(calls), "outputs")
    return got_apart(calls, match_inputs(calls)) and (after is None or after > SAME)


def _is_of_other_shapes(node: Node) -> bool:
    """Return whether a submodule returns other shapes, and gets an array that is not among those of its counterpart."""
    calls = node.calls[0]
    groups = match_inputs(calls)
    floats = {side: sum(map(is_float, calls[side].arguments.leaves)) for side in SIDES}
    is_whole = all(sum(len(group.places(side)) for group in groups) == floats[side] for side in SIDES)
    return not is_whole and _returns_other_shapes(node)


def _shaped_apart(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Tell whether both calls have floating-point arrays, and no two of these hold equally many numbers by shape."""
    return all(any(map(is_float, leaves)) for leaves in (first, second)) and not match_leaves(first, second)


def _is_given_twice(calls: Mapping[Side, Call], groups: Sequence[LeafGroup]) -> bool:
    """Return whether one side gets an array twice where the other, of as many arrays, gets another one."""
    floats = {side: [i for i, leaf in enumerate(calls[side].arguments.leaves) if is_float(leaf)] for side in calls}
    lost = {side: len(floats[side]) - sum(len(group.places(side)) for group in groups) for side in calls}
    gained = sum(len(group.second) - len(group.first) for group in groups)
    return len(floats["first"]) == len(floats["second"]) and gained != 0 and sorted(lost.values()) == [0, abs(gained)]
