"""Match tensors of both sides by name and shape, and find the groups whose matching remains ambiguous."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from ..sides.subject import Array
from .names import Name, layer_of, likeness, read
from .patterns import WayOptions, kind_of, options
from .tensors import Tensor

# Any value from 0.02 to 0.5 settles the pairings of parity_tests/neutral/judge/pairing; at 1.0 a number in a name no
# longer tells a layer from its sibling. The order of declaration and `IN_ORDER` add less.
MARGIN = 0.15
"""Least difference of scores between two pairings that settles the better one; closer ones are tried by running."""

IN_ORDER = 0.02
"""Penalty for matching the first of a group by order of use with the last; well below `MARGIN`, so that names decide
first."""


# Names add at most 1.0 for words, 0.5 for literal words, 1.0 for the role, 0.5 and 0.25 for numbers (`names.likeness`):
# 3.25.
OTHER_LAYER = 4.0
"""Taken off the score of a slice of a stack and a tensor of another layer: more than all that names add."""


class TensorSides:
    """The tensors of both sides with their parsed names, and scores for each pair of them.

    Args:
        first: tensors of the first side.
        second: tensors of the second side.
    """

    def __init__(self, first: Sequence[Tensor], second: Sequence[Tensor]):
        self.first, self.second = first, second
        self.names = read(first), read(second)
        self.kinds = [
            [kind_of(tensor, name.last) for tensor, name in zip(side, names, strict=True)]
            for side, names in zip((first, second), self.names, strict=True)
        ]

        self.layers = [
            [(kind.layer, kind.last or template(name.own)) for kind, name in zip(kinds, names, strict=True)]
            for kinds, names in zip(self.kinds, self.names, strict=True)
        ]

    def options(self, i: int, j: int) -> WayOptions:
        """Return the ways from one of the first side's tensors to one of the second's."""
        equal = self.names[0][i].same == self.names[1][j].same
        return options(self.kinds[0][i], self.kinds[1][j], equal)

    def likeness(self, *, numbers: bool = True) -> Array:
        """Return how much names speak for each two, with or without their numbers; -inf where shapes forbid them.

        Among equals the order of declaration decides, by less than names ever do.
        """
        if not self.first or not self.second:
            return np.zeros((len(self.first), len(self.second)))
        score = likeness(*self.names, numbers=numbers)
        places = [_places(names) for names in self.names]
        # Ranks are in [0, 1), so this takes off less than 1e-3. Squares make the sum least where both sides are sorted
        # alike (rearrangement inequality); with absolute differences many bijections would be equal.
        score -= 1e-3 * (places[0][:, None] - places[1][None, :]) ** 2
        # Symmetric: either side may have the stack.
        score -= OTHER_LAYER * (_strays(self.first, self.second) | _strays(self.second, self.first).T)
        kinds = [list(dict.fromkeys(side)) for side in self.kinds]
        table = np.array([[bool(options(one, two, equal_names=False).ways) for two in kinds[1]] for one in kinds[0]])
        number = [{kind: i for i, kind in enumerate(side)} for side in kinds]
        rows, columns = ([number[k][kind] for kind in self.kinds[k]] for k in (0, 1))
        fitting: Array = np.where(table[np.ix_(rows, columns)], score, -np.inf)
        return fitting

    def within(self, layers: Mapping[str, str]) -> Array:
        """Return 1 for each two of which the one's layer is known to be the other's, else 0."""
        ours = [layers.get(layer_of(tensor), "") for tensor in self.first]
        theirs = [layer_of(tensor) for tensor in self.second]
        same = np.array(ours, dtype=object)[:, None] == np.array(theirs, dtype=object)[None, :]
        matrix: Array = (same & np.array([bool(one) for one in ours])[:, None]).astype(np.float64)
        return matrix

    def housed(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Array:
        """For each pair of tensors, return the overlap of their parent modules: the settled pairs that both share.

        It is the intersection over the union of the pairs inside either module, in [0, 1]; 1.0 means that both modules
        contain the same pairs. So two norms are matched if the attention next to them is.

        Args:
            pairs: settled pairs (first side, second side).

        Returns:
            (tensors of the first side, tensors of the second side), float64.
        """
        inside, number = [], []
        for which, tensors in enumerate((self.first, self.second)):
            holders = [(layer_of(one) or one.spelled).rpartition(".")[0] for one in tensors]
            number_of = {path: place for place, path in enumerate(dict.fromkeys(holders))}
            paths = [f".{pair[which].spelled}" for pair in pairs]
            rows = [[path.startswith(f".{holder}." if holder else ".") for path in paths] for holder in number_of]
            inside.append(np.array(rows, np.float64).reshape(len(number_of), len(paths)))
            number.append([number_of[holder] for holder in holders])
        # |A and B| as products of indicators, |A or B| = |A| + |B| - |A and B|; modules without settled pairs divide by
        # 1, for an overlap of 0.
        shared = inside[0] @ inside[1].T
        either = inside[0].sum(1)[:, None] + inside[1].sum(1)[None, :] - shared
        overlap: Array = (shared / np.maximum(either, 1.0))[np.ix_(*number)]
        return overlap


def _strays(slices: Sequence[Tensor], tensors: Sequence[Tensor]) -> Array:
    """Return True for each slice of a stack and each tensor that is in another layer than the slice's."""
    strays = np.zeros((len(slices), len(tensors)), bool)
    inside = collections.defaultdict(list)
    for j, tensor in enumerate(tensors) if any(piece.layers for piece in slices) else ():
        for path in itertools.accumulate(tensor.spelled.split("."), "{}.{}".format):
            inside[path].append(j)
    for i, piece in enumerate(slices):
        if piece.layers:
            strays[i] = True
            strays[i, [j for path in piece.layers for j in inside[path]]] = False
    return strays


def _places(names: Sequence[Name]) -> Array:
    """Return the rank of each name in the order of declaration, scaled to [0, 1)."""
    order = sorted(range(len(names)), key=lambda i: names[i].natural)
    places = np.empty(len(names))
    places[order] = np.arange(len(names)) / max(len(names), 1)
    return places


def equals(sides: TensorSides) -> list[tuple[int, int]]:
    """Return the pairs that names alone settle: equal names first, then names with the same meaning.

    A name is used only if it is unique on each side. Names that merely have the same meaning also need layers whose
    other tensors have compatible shapes: the second `fc` is not the second of all `Dense`.

    Returns:
        Pairs of positions (first side, second side).
    """
    fits = _layers_fit(sides)
    left: list[list[int]] = [list(range(len(side))) for side in (sides.first, sides.second)]
    pairs_by_name: list[tuple[int, int]] = []
    keys: tuple[Callable[[Name], Hashable], ...] = (lambda name: name.same, lambda name: name.alike)
    for key in keys:
        by_key: list[dict[Hashable, list[int]]] = []
        for which in (0, 1):
            groups = collections.defaultdict(list)
            for i in left[which]:
                groups[key(sides.names[which][i])].append(i)
            by_key.append(groups)
        pairs = [
            (some[0], by_key[1][word][0])
            for word, some in by_key[0].items()
            if len(some) == 1 and len(by_key[1].get(word, ())) == 1 and sides.options(some[0], by_key[1][word][0]).ways
        ]
        pairs = [(i, j) for i, j in pairs if sides.names[0][i].same == sides.names[1][j].same or fits(i, j)]
        pairs_by_name += pairs
        for which in (0, 1):
            paired = {pair[which] for pair in pairs}
            left[which] = [i for i in left[which] if i not in paired]
    return pairs_by_name


def _layers_fit(sides: TensorSides) -> Callable[[int, int], bool]:
    """Return a predicate: whether the layers of two tensors have compatible shapes in every role that both have.

    Nor may one of them lack a role, such as a bias, that another layer of its side has.
    """
    members: list[dict[str, dict[str, int]]] = [{}, {}]
    for roles, names in zip(members, sides.names, strict=True):
        for position, name in enumerate(names):
            roles.setdefault(name.layer, {})[name.role] = position
    roles_of = [frozenset(name.role for name in names) for names in sides.names]

    def fits(i: int, j: int) -> bool:
        ours, theirs = (members[side][sides.names[side][at].layer] for side, at in ((0, i), (1, j)))
        if (theirs.keys() - ours.keys()) & roles_of[0] or (ours.keys() - theirs.keys()) & roles_of[1]:
            return False
        return all(sides.options(ours[role], theirs[role]).ways for role in ours.keys() & theirs.keys() if role)

    return fits


def best(scores: Array) -> list[int] | None:
    """Return for each first tensor its second tensor in the best bijection; None if no bijection exists.

    Args:
        scores: (tensors of the first side, tensors of the second side); -inf forbids a pair.
    """
    if not scores.size:
        return [] if scores.shape[0] == scores.shape[1] else None
    from scipy.optimize import linear_sum_assignment  # JAX brings scipy

    if scores.shape[0] != scores.shape[1]:
        return None
    # scipy raises an error where infinite costs leave no assignment; a large finite cost lets it return its best, which
    # the next check refuses.
    rows, columns = linear_sum_assignment(np.where(np.isfinite(scores), -scores, 1e6))
    if not np.isfinite(scores[rows, columns]).all():
        return None
    return [int(column) for column in columns[np.argsort(rows)]]


def left_over(scores: Array) -> tuple[list[int], list[int]]:
    """Return the unmatched positions on each side after greedy matching by score."""
    left, right = set(range(scores.shape[0])), set(range(scores.shape[1]))
    finite = [(float(scores[i, j]), int(i), int(j)) for i, j in zip(*np.nonzero(np.isfinite(scores)), strict=True)]
    for _, i, j in sorted(finite, reverse=True):
        if i in left and j in right:
            left.remove(i)
            right.remove(j)
    return sorted(left), sorted(right)


def open_groups(scores: Array, assignment: Sequence[int]) -> list[list[int]]:
    """Return the groups of first tensors that could exchange their counterparts without the names objecting."""
    count = len(assignment)
    if not count:
        return []
    matched = scores[np.arange(count), list(assignment)]
    permuted = scores[:, list(assignment)]
    with np.errstate(invalid="ignore"):
        # What the sum of scores loses if i and j exchange their counterparts. Where shapes forbid that, it is infinite,
        # not a tie.
        loss = matched[:, None] + matched[None, :] - permuted - permuted.T
    close = np.isfinite(loss) & (loss < MARGIN)
    # Connected components: tensors that could exchange step by step are one group.
    groups, left = [], set(range(count))
    while left:
        group: set[int] = set()
        edge = {min(left)}
        while edge:
            group |= edge
            edge = {int(j) for j in np.nonzero(close[list(edge)].any(axis=0))[0]} - group
        left -= group
        groups.append(sorted(group))
    return [group for group in groups if len(group) > 1]


def arranged(
    scores: Array, assignment: Sequence[int], groups: Sequence[Sequence[int]], *, in_order: bool = False
) -> list[int]:
    """Return the bijection with the members of each group given to one another's counterparts as suits them best.

    Args:
        scores: what speaks for each pair.
        assignment: the bijection.
        groups: tensors of the first side that could exchange their counterparts.
        in_order: whether the order of the tensors speaks, too: the first of a group goes with the first.
    """
    arrangement = list(assignment)
    for group in groups:
        counterparts = [assignment[i] for i in group]
        suits = scores[np.ix_(group, counterparts)]
        if in_order:
            counterparts.sort()
            rank = np.arange(len(group)) / len(group)
            # Squared, for the reason given in `likeness`.
            suits = scores[np.ix_(group, counterparts)] - IN_ORDER * (rank[:, None] - rank) ** 2
        for i, position in zip(group, best(suits) or (), strict=False):
            arrangement[i] = counterparts[position]
    return arrangement


@dataclasses.dataclass
class LayerGroup:
    """Layers that could exchange their counterparts: role -> position of the tensor, for each, on both sides in turn.

    A layer's weight and bias go together.
    """

    first: list[dict[str, int]]
    second: list[dict[str, int]]


def by_layers(sides: TensorSides, groups: Sequence[Sequence[int]], assignment: Sequence[int]) -> list[LayerGroup]:
    """Return groups of tensors as groups of layers, those of the same layers made one."""
    groups_of_layers: dict[Hashable, LayerGroup] = {}
    for number, group in enumerate(groups):
        ours = {sides.names[0][i].layer: i for i in group}
        theirs = {sides.names[1][assignment[i]].layer: assignment[i] for i in group}
        roles = {sides.names[0][i].role for i in group} | {sides.names[1][assignment[i]].role for i in group}
        is_plain = len(roles) == 1 and len(ours) == len(theirs) == len(group)
        role = next(iter(roles)) if is_plain else ""
        key: Hashable = (frozenset(ours), frozenset(theirs)) if is_plain else number
        if key not in groups_of_layers:
            groups_of_layers[key] = LayerGroup([{role: i} for i in group], [{role: assignment[i]} for i in group])
            continue
        for members, names, mine in (
            (groups_of_layers[key].first, sides.names[0], ours),
            (groups_of_layers[key].second, sides.names[1], theirs),
        ):
            for member in members:
                member[role] = mine[names[next(iter(member.values()))].layer]
    return list(groups_of_layers.values())


def template(name: str) -> str:
    """Return a name with its numbers left out."""
    return re.sub(r"[0-9]+", "#", name)


def likely_orders(lists: Sequence[str], places: Sequence[tuple[tuple[int, int], ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which the second side's layers may go to the first side's, the likeliest first.

    After the usual order come those in which layers of one list keep their order: the second side has the lists one
    after another, or counts the layers of all lists together. All other orders follow.

    Args:
        lists: the list that each layer of the first side is in.
        places: keys that sort the second side's layers as they were declared.
    """
    yielded: set[tuple[int, ...]] = set()
    usual = tuple(range(len(lists)))
    for order in itertools.chain([usual], _by_lists(lists, places), itertools.permutations(usual)):
        if order not in yielded:
            yielded.add(order)
            yield order


def _by_lists(lists: Sequence[str], places: Sequence[tuple[tuple[int, int], ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which each list of the first side meets layers of the second in the declared order."""
    members = collections.defaultdict(list)
    for i, name in enumerate(lists):
        members[name].append(i)
    count, size = len(members), len(lists) // len(members)
    if count < 2 or any(len(some) != size for some in members.values()):
        return
    declared = sorted(range(len(places)), key=lambda j: places[j])
    for ranks in itertools.permutations(range(count)):
        # Interleaved, with layer 0 of every list first; then one list after another.
        for step, stride in ((1, count), (size, 1)):
            order = [0] * len(lists)
            for rank, some in zip(ranks, members.values(), strict=True):
                for number, i in enumerate(some):
                    order[i] = declared[rank * step + number * stride]
            yield tuple(order)
