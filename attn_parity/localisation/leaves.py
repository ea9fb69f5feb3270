"""Which array of one side's call is which of the other's: by value where they agree, by shape and place where not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..results.findings import Side
from ..samples.calls import is_mask
from ..sides.arrays import is_float, numpy_dtype, release
from ..sides.subject import Arguments, Array, Call
from ..verdict.measures import CHUNK, without_far_entries

_CLOSE, _ALIKE = 1e-6, 0.1
"""Relative differences below which two arrays hold the same numbers, and much the same."""

_MAX_AXES = 4
"""Most axes whose orders are all considered (4! = 24); of more, one axis may have moved, as the channels of a volume
do."""

_MOST_POSITIONS = 64
"""Most positions of an array's largest number in another array at which the whole array is looked for."""

_MOST_STRIDE = 4
"""Largest stride at which an array's numbers are looked for in another, as one side's convolution may take them."""


@dataclasses.dataclass(frozen=True)
class AxisTurn:
    """How an array of the first side becomes one of the second: axes permuted on one side, then reshaped."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    axes: tuple[int, ...]
    of: Side = "first"

    @property
    def is_plain(self) -> bool:
        """Whether no axes are exchanged."""
        return self.axes == tuple(range(len(self.axes)))

    @property
    def counts_alike(self) -> bool:
        """Whether an axis has the same number on both sides."""
        return self.is_plain and self.first == self.second

    @property
    def moves_one_axis(self) -> bool:
        """Whether the other axes keep their order, as those of an image whose channels come first or last."""
        return any((rest := [axis for axis in self.axes if axis != moved]) == sorted(rest) for moved in self.axes)

    @property
    def keeps_neighbours(self) -> bool:
        """Whether the reshape only merges or splits neighbouring axes."""
        turned, result = (self.first, self.second) if self.of == "first" else (self.second, self.first)
        turned = tuple(turned[axis] for axis in self.axes)
        return turned == result or _refines(turned, result)

    def to_second(self, array: Array) -> Array:
        """Bring an array of the first side into the second side's axes."""
        if self.of == "first":
            return array.transpose(self.axes).reshape(self.second)
        return array.reshape([self.second[axis] for axis in self.axes]).transpose(np.argsort(self.axes))

    def to_first(self, array: Array) -> Array:
        """Bring an array of the second side into the first side's axes."""
        if self.of == "second":
            return array.transpose(self.axes).reshape(self.first)
        return array.reshape([self.first[axis] for axis in self.axes]).transpose(np.argsort(self.axes))


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Arrays that hold the same numbers on each side, by position among all of a call, and how axes correspond."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    turn: AxisTurn

    def places(self, side: Side) -> tuple[int, ...]:
        """Return the positions on one side."""
        return self.first if side == "first" else self.second

    def value(self, side: Side, leaves: Sequence[Array]) -> Array:
        """Return one side's array with the first side's axes."""
        array = leaves[self.places(side)[0]]
        return array if side == "first" else self.turn.to_first(array)

    def given(self, side: Side, value: Array) -> Array:
        """Return an array with the first side's axes as one side takes it."""
        return np.asarray(value if side == "first" else self.turn.to_second(value), order="C")

    def total(self, side: Side, gradients: Sequence[Array | None]) -> Array | None:
        """Return the gradient with respect to the array that all of one side's are, with the first side's axes."""
        present = [gradient for i in self.places(side) if i < len(gradients) and (gradient := gradients[i]) is not None]
        if not present:
            return None
        result = present[0]
        for array in present[1:]:
            result = result + array
        return result if side == "first" else self.turn.to_first(result)


def match_leaves(first: Sequence[Array], second: Sequence[Array]) -> list[LeafGroup]:
    """Match floating-point arrays of two calls; one that fits none by shape is left out."""
    ours, theirs = _same(first), _same(second)
    options = []
    for i, mine in enumerate(ours):
        for j, its in enumerate(theirs):
            best = _best_turn(first[mine[0]], second[its[0]])
            if best is not None and not (best[0] == 2 and _are_other_masks(first[mine[0]], second[its[0]])):
                tier, turn = best
                options.append((tier, not turn.is_plain, abs(i - j), i, j, LeafGroup(tuple(mine), tuple(its), turn)))
    options.sort(key=lambda option: option[:5])
    used: tuple[set[int], set[int]] = (set(), set())
    groups = []
    for *_, i, j, group in options:
        if i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            groups.append((i, group))
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


def is_turned(groups: Sequence[LeafGroup]) -> bool:
    """Return whether arrays of equal shapes are the same with axes exchanged alone."""
    return any(not group.turn.is_plain and group.turn.first == group.turn.second for group in groups)


def match_inputs(calls: Mapping[Side, Call]) -> list[LeafGroup]:
    """Match the floating-point arguments of one call of each side."""
    return match_leaves(calls["first"].arguments.leaves, calls["second"].arguments.leaves)


def match_outputs(calls: Mapping[Side, Call]) -> list[LeafGroup]:
    """Match the floating-point outputs of one call of each side.

    The whole module's outputs are judged one by one, so they go together in their order; of a submodule, by value.
    """
    first, second = (calls[side].outputs for side in ("first", "second"))
    is_whole = not any(calls[side].path for side in calls)
    if is_whole and [leaf.shape for leaf in first] == [leaf.shape for leaf in second]:
        turns = [AxisTurn(leaf.shape, leaf.shape, tuple(range(leaf.ndim))) for leaf in first]
        floats = [i for i, both in enumerate(zip(first, second, strict=True)) if all(map(is_float, both))]
        return [LeafGroup((i,), (i,), turns[i]) for i in floats]
    return match_leaves(first, second)


def got_apart(calls: Mapping[Side, Call], groups: Sequence[LeafGroup]) -> bool:
    """Return whether both sides get arrays that cannot be fed, with different numbers.

    A cell may get its input and its state joined on one side alone, and a convolution its image with a border: all
    numbers of one are then among the other's, as a block where both have as many axes. Otherwise the code in front
    differs. Masks, whose form differs, do not count.
    """
    left: list[list[Array]] = []
    for side in ("first", "second"):
        places = {place for group in groups for place in group.places(side)}
        leaves = enumerate(calls[side].arguments.leaves)
        left.append([leaf for place, leaf in leaves if place not in places and is_float(leaf) and not is_mask(leaf)])
    fewer, more = sorted(left, key=lambda rest: sum(leaf.size for leaf in rest))
    if not any(leaf.size for leaf in fewer):
        return False
    return not all(any(_is_within(leaf, other) for other in more) for leaf in fewer)


def _is_within(part: Array, whole: Array) -> bool:
    """Return whether all numbers of an array are among another's, as a block where both have as many axes.

    The block may be strided.
    """
    if not part.size or not whole.size:
        return not part.size
    bound = _CLOSE * float(np.abs(whole).max())
    if part.ndim != whole.ndim:
        wanted, numbers = np.ravel(part), np.sort(np.ravel(whole))
        above = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        nearest = np.minimum(np.abs(wanted - numbers[above]), np.abs(wanted - numbers[np.maximum(above - 1, 0)]))
        return bool(nearest.max() <= bound)
    for axes in _orders(part.ndim):
        turned = part.transpose(axes)
        largest = np.unravel_index(np.argmax(np.abs(turned)), turned.shape)
        for position in np.argwhere(np.abs(whole - turned[largest]) <= bound)[:_MOST_POSITIONS]:
            for stride in range(1, _MOST_STRIDE + 1):
                steps = np.where(np.greater(whole.shape, turned.shape), stride, 1)
                start = np.maximum(position - steps * largest, 0)
                block = whole[tuple(map(slice, start, start + steps * turned.shape, steps))]
                if block.shape == turned.shape and np.abs(block - turned).max() <= bound:
                    return True
    return False


def other_layouts(
    first: Sequence[Array], second: Sequence[Array], groups: Sequence[LeafGroup]
) -> list[list[LeafGroup]]:
    """Return the groups with another axis moved, for groups whose axes only the shapes determine.

    Those are groups whose numbers agree in no order. ``(B, 4, 4, 4)`` may be an image with its channels first or last,
    and ``(6, 8, 8)`` next to ``(2, 3, 8, 8)`` too.
    """
    unsure: dict[int, dict[tuple[int, ...], AxisTurn]] = {}
    for position, group in enumerate(groups):
        first_leaf, second_leaf = first[group.first[0]], second[group.second[0]]
        if relative([(group.turn.to_second(first_leaf), second_leaf)]) >= _CLOSE:
            turns = (turn for turn, _ in _turns(first_leaf.shape, second_leaf.shape) if turn.keeps_neighbours)
            unsure[position] = {turn.axes: turn for turn in turns if turn.moves_one_axis}
    axes_in_use = {group.turn.axes for position, group in enumerate(groups) if position in unsure}
    layouts = dict.fromkeys(axes for turns in unsure.values() for axes in turns)
    other_groupings = []
    for axes in layouts:
        if axes_in_use != {axes}:
            turned = {position: turns[axes] for position, turns in unsure.items() if axes in turns}
            changed = {position: dataclasses.replace(groups[position], turn=turn) for position, turn in turned.items()}
            other_groupings.append([changed.get(position, group) for position, group in enumerate(groups)])
    return other_groupings


def match_by_place(first: Arguments, second: Arguments) -> list[LeafGroup] | None:
    """Match the floating-point arrays of two calls one by one, as they were given; None if they are not alike."""
    groups = []
    for i, j in _places(first, second, floats=True) or ():
        if _are_other_masks(first.leaves[i], second.leaves[j]):
            continue
        turn = _plain_turn(first.leaves[i].shape, second.leaves[j].shape)
        if turn is None:
            return None
        groups.append(LeafGroup((i,), (j,), turn))
    return groups or None


def whole_numbers(first: Arguments, second: Arguments) -> list[tuple[int, int]]:
    """Return the positions of arrays of integers or truth values that the two calls have in the same place."""
    pairs = _places(first, second, floats=False) or []
    return [(i, j) for i, j in pairs if _whole_apart(first.leaves[i], second.leaves[j])]


def whole_outputs(first: Call, second: Call) -> bool:
    """Return whether integers or truth values that two calls returned in the same place are not the same."""
    ours, theirs = ([leaf for leaf in call.outputs if not is_float(leaf)] for call in (first, second))
    return len(ours) == len(theirs) and any(map(_whole_apart, ours, theirs))


def _whole_apart(left: Array, right: Array) -> bool:
    return (
        left.shape == right.shape and (left.dtype == bool) == (right.dtype == bool) and not np.array_equal(left, right)
    )


def _places(first: Arguments, second: Arguments, *, floats: bool) -> list[tuple[int, int]] | None:
    """Pair the arrays of a kind by keyword where both have the same ones, else by order; None if numbers differ."""
    ours = [i for i, leaf in enumerate(first.leaves) if is_float(leaf) == floats]
    theirs = [j for j, leaf in enumerate(second.leaves) if is_float(leaf) == floats]
    if len(ours) != len(theirs):
        return None
    names = [first.paths[i] for i in ours], [second.paths[j] for j in theirs]
    if len(set(names[0])) == len(ours) and sorted(names[0]) == sorted(names[1]):
        return [(i, theirs[names[1].index(name)]) for i, name in zip(ours, names[0], strict=True)]
    return list(zip(ours, theirs, strict=True))


def _same(leaves: Sequence[Array]) -> list[list[int]]:
    """Group the floating-point arrays that hold the same numbers."""
    groups: list[list[int]] = []
    for position, leaf in enumerate(leaves):
        if not is_float(leaf):
            continue
        for group in groups:
            representative = leaves[group[0]]
            if representative.shape == leaf.shape and np.array_equal(representative, leaf):
                group.append(position)
                break
        else:
            groups.append([position])
    return groups


def _are_other_masks(left: Array, right: Array) -> bool:
    """Return whether one array is a mask that is added to scores and the other a mask of zeros and ones.

    Neither can take the other's place: to a side that adds, 1 hides nothing.
    """
    if not (is_mask(left) and is_mask(right)):
        return False
    are_added = bool((left < 0).any()), bool((right < 0).any())
    return are_added[0] != are_added[1] and bool((right if are_added[0] else left).any())


def _best_turn(left: Array, right: Array) -> tuple[int, AxisTurn] | None:
    """Return the best way to turn one array into the other, behind its rank; None if no shape fits.

    The rank is 0 if the numbers agree, 1 if they agree roughly, and 2 if only the shapes do. Shapes do not match
    alone where several axes change places: a side may cut its tokens into an image of the other orientation.
    """
    if left.size != right.size:
        return None
    best: tuple[int, AxisTurn] | None = None
    for turn, needs_values in _turns(left.shape, right.shape):
        apart = relative([(turn.to_second(left), right)])
        tier = 0 if apart < _CLOSE else 1 if apart < _ALIKE else 2
        if (tier == 0 or not needs_values) and (best is None or tier < best[0]):
            best = tier, turn
        if best is not None and best[0] == 0:
            break
    return None if best is not None and best[0] == 2 and not best[1].moves_one_axis else best


def _turns(left: tuple[int, ...], right: tuple[int, ...]) -> Iterator[tuple[AxisTurn, bool]]:
    """Yield the axis orders that turn one shape into the other, and whether only numbers can confirm them."""
    plain = _plain_turn(left, right)
    if plain is not None:
        yield plain, False
    if len(left) == len(right):
        for axes in _orders(len(left)):
            if tuple(left[axis] for axis in axes) == right and axes != tuple(range(len(left))):
                yield AxisTurn(left, right, axes), False
    elif max(len(left), len(right)) <= _MAX_AXES:
        side: Side = "first" if len(left) > len(right) else "second"
        for axes in itertools.permutations(range(max(len(left), len(right)))):
            yield AxisTurn(left, right, axes, side), True


def _orders(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the possible orders of `count` axes on the other side; above `_MAX_AXES`, those that move a single axis."""
    if count <= _MAX_AXES:
        yield from itertools.permutations(range(count))
        return
    for moved, position in itertools.permutations(range(count), 2):
        rest = [axis for axis in range(count) if axis != moved]
        yield (*rest[:position], moved, *rest[position:])


def _plain_turn(left: tuple[int, ...], right: tuple[int, ...]) -> AxisTurn | None:
    """Return the reshape from one shape to the other if it only merges, splits or drops neighbouring axes."""
    if (
        left == right
        or (len(left) != len(right) and _bare(left) == _bare(right))
        or _refines(left, right)
        or _refines(right, left)
    ):
        return AxisTurn(left, right, tuple(range(len(left))))
    return None


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _refines(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Return whether merging neighbours of one shape gives the other, axes of length 1 aside."""
    rest = list(_bare(fine))
    for size in _bare(coarse):
        product = 1
        while product < size and rest:
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest and 0 not in fine


# ---- feeding


def fed(
    calls: dict[Side, Call],
    groups: Sequence[LeafGroup],
    source: Side,
    *,
    discrete: Sequence[tuple[int, int]] = (),
    copy: int = 0,
    times: float = 1.0,
    dtype: str | None = None,
) -> dict[Side, Arguments]:
    """Return both calls with every matched array taken from one side.

    Args:
        calls: the calls.
        groups: which floating-point array is which.
        source: the side whose numbers are taken.
        discrete: positions of integers and truth values that are taken, too.
        copy: above 0, the numbers are moved a little, by other random numbers for each copy.
        times: factor of the numbers, but for those of masks.
        dtype: precision of all floating-point arrays; None leaves them.
    """
    leaves = {side: list(call.arguments.leaves) for side, call in calls.items()}
    source_leaves = calls[source].arguments.leaves
    for group in groups:
        value = group.value(source, source_leaves)
        if times != 1.0 and not is_mask(value):
            value = value * times
        if copy:
            value = value * (1.0 + 2.0**-10 * np.random.default_rng([copy, group.first[0]]).normal(size=value.shape))
        for side in leaves:
            for position in group.places(side):
                leaves[side][position] = group.given(side, value)
    for i, j in discrete:
        if source == "first":
            leaves["second"][j] = source_leaves[i].astype(leaves["second"][j].dtype)
        else:
            leaves["first"][i] = source_leaves[j].astype(leaves["first"][i].dtype)
    return {side: calls[side].arguments.with_leaves([in_dtype(one, dtype) for one in leaves[side]]) for side in calls}


def fed_alike(calls: dict[Side, Call]) -> dict[Side, Call] | None:
    """Return two calls on the same rows where the sides call a module with different numbers of them; else None.

    An expert that one side gives its own tokens and the other side all of them has no array in common; both can be
    given the more of them.
    """
    first, second = calls["first"], calls["second"]
    leaves = [[leaf for leaf in one.arguments.leaves if is_float(leaf)] for one in (first, second)]
    if any(len(one) != 1 or len(call.arguments.leaves) != 1 for one, call in zip(leaves, calls.values(), strict=True)):
        return None
    (mine,), (its,) = leaves
    if mine.size == its.size or mine.shape[-1:] != its.shape[-1:] or match_leaves(first.outputs, second.outputs):
        return None
    if [one.shape[-1:] for one in first.outputs] != [one.shape[-1:] for one in second.outputs]:
        return None
    source, target = (first, second) if mine.size > its.size else (second, first)
    rows = dataclasses.replace(
        target,
        arguments=target.arguments.with_leaves(source.arguments.leaves),
        outputs=source.outputs,
        cotangents=source.cotangents,
    )
    return {side: source if call is source else rows for side, call in calls.items()}


def fed_cotangents(
    calls: dict[Side, Call], groups: Sequence[LeafGroup], source: Side, dtype: str | None = None
) -> dict[Side, list[Array | None]]:
    """Return the gradients for both sides' outputs, taken from one of them; an unmatched output gets none."""
    cotangents: dict[Side, list[Array | None]] = {side: [None] * len(call.outputs) for side, call in calls.items()}
    of_source = calls[source].cotangents
    for group in groups:
        value = group.total(source, of_source[: len(calls[source].outputs)])
        if value is None:
            continue
        for side in cotangents:
            cotangents[side][group.places(side)[0]] = group.given(side, in_dtype(value, dtype))
    return cotangents


def in_dtype(array: Array, dtype: str | None) -> Array:
    """Return a floating-point array in a precision; None, and other arrays, stay as they are."""
    return array.astype(numpy_dtype(dtype)) if dtype is not None and is_float(array) else array


def distance(left: Array, right: Array) -> float:
    """Return the largest absolute difference; numbers that are not finite on one side only are infinitely far."""
    if left.shape != right.shape:
        return float("inf")
    if not left.ndim:
        return _distance(left, right)
    rows = max(1, CHUNK * len(left) // max(left.size, 1))
    largest = max((_distance(left[n : n + rows], right[n : n + rows]) for n in range(0, len(left), rows)), default=0.0)
    release(left, right)
    return largest


def _distance(left: Array, right: Array) -> float:
    left, right = left.astype(np.float64, copy=False), right.astype(np.float64, copy=False)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(left - right))
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0.0))


def relative(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Return the largest difference of some pairs of arrays, each relative to its largest value but for far entries."""
    largest = 0.0
    for pair in pairs:
        first, second, scale = without_far_entries(*(x if is_float(x) else x.astype(np.float64) for x in pair))
        largest = max(largest, distance(first, second) / (scale or 1.0))
    return largest


def apart(calls: dict[Side, Call], groups: Sequence[LeafGroup], what: str) -> float | None:
    """Return how far apart the ``inputs``, ``outputs`` or ``cotangents`` of two calls are; None if nothing matches."""
    pairs = []
    for group in groups:
        first, second = (_value(group, side, calls[side], what) for side in calls)
        if first is not None and second is not None:
            pairs.append((first, second))
    return relative(pairs) if pairs else None


def _value(group: LeafGroup, side: Side, call: Call, what: str) -> Array | None:
    if what == "inputs":
        return group.value(side, call.arguments.leaves)
    if what == "outputs":
        return group.value(side, call.outputs)
    return group.total(side, call.cotangents)
