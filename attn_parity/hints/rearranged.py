"""Other orders of the entries of an axis, and of the weights of a module, that ports take for the right ones.

In: a size, or the weights of one side by name. Out: orders, or weights in another order, each with a description. The
side runs with them, to see whether it then agrees with the other side.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from .case import Array, Arrays, divisors
from .changes import MOST_PARTS, orders

MOST_SINGLE = 8
"""Most entries of which any two are exchanged; ..."""

MOST_NEIGHBOURS = 64
"""... of more, up to this number, two neighbours."""

Rearranged = Callable[[Arrays], Arrays]
"""From the weights of a side to its weights in another order."""


def orders_of(size: int) -> Iterator[tuple[str, Array]]:
    """Yield the orders of the entries of an axis, without their own, the simplest first."""
    tried = {np.arange(size).tobytes()}
    for text, order in _orders_of(size):
        if order.tobytes() not in tried:
            tried.add(order.tobytes())
            yield text, order


def _orders_of(size: int) -> Iterator[tuple[str, Array]]:
    own = np.arange(size)
    for left, right in itertools.combinations(range(size if size <= MOST_SINGLE else 0), 2):
        yield _exchanged(own, left, right)
    for order in map(np.array, itertools.permutations(own) if size <= MOST_PARTS else ()):
        yield f"in the order {tuple(order.tolist())}", order
    yield "reversed", own[::-1].copy()
    for step in (1, -1):
        yield f"shifted by {step}", np.roll(own, step)
    # Heads, channels and fused projections: as (a, b), then as (a, b, c) with two neighbours of these exchanged.
    factors = [one for one in range(1, size + 1) if size % one == 0]
    shapes = [(a, b, size // a // b) for a, b in itertools.product(factors, repeat=2) if size % (a * b) == 0]
    ways = [(shape, axes) for shape in shapes for axes in ((1, 0, 2), (0, 2, 1))]
    for shape, axes in sorted(ways, key=lambda way: _likelihood(*way)):
        texts = [", ".join(str(shape[axis]) for axis in some if shape[axis] > 1) for some in (range(3), axes)]
        yield f"as ({texts[0]}) transposed to ({texts[1]})", own.reshape(shape).transpose(axes).reshape(-1)
    for width in (one for one in divisors(size) if one > 1):
        for parts in (one for one in range(2, MOST_PARTS + 1) if width % one == 0):
            for text, some in orders(range(parts), parts):
                moved = own.reshape(-1, parts, width // parts)[:, list(some)].reshape(-1)
                if width == size:
                    yield f"with {text}", moved
                elif parts < MOST_PARTS and " exchanged" in text:
                    yield f"with {text} in each {width}", moved
    for groups, several, width in ((a, b - 2, c) for a, b, c in shapes if a > 1 and b > 3):
        whole = np.split(own, [groups * several * width, groups * (several + 1) * width])
        order = np.concatenate([part.reshape(groups, -1) for part in whole], 1).reshape(-1)
        kinds = "queries, keys and values", f"{groups} groups of {several} queries, a key and a value of {width}"
        yield f"from {kinds[0]} to {kinds[1]}", order
        yield f"from {kinds[1]} to {kinds[0]}", np.argsort(order)
    for at in range(size - 1 if size <= MOST_NEIGHBOURS else 0):
        yield _exchanged(own, at, at + 1)


def _likelihood(shape: tuple[int, int, int], axes: tuple[int, int, int]) -> tuple[bool, bool]:
    """Sort the exchange of two axes: that of a few parts first, then of two axes alone."""
    moved = {size for axis, size in enumerate(shape) if axes[axis] != axis}
    return not moved & {2, 3}, 1 not in shape


def _exchanged(own: Array, left: int, right: int) -> tuple[str, Array]:
    order = own.copy()
    order[[left, right]] = right, left
    return f"with entries {left} and {right} exchanged", order


def reshapes(operand: Array, shape: Sequence[int]) -> Iterator[tuple[str, Array]]:
    """Yield an array in another shape with the axes that an axis is split into, or merged from, in other orders."""
    before, after = ([size for size in sizes if size > 1] for sizes in (operand.shape, shape))
    if not operand.size or math.prod(before) != math.prod(after):
        return
    outer = 1
    for old, new in _matched(before, after):
        count = math.prod(old)
        sizes = new if len(old) == 1 else old if len(new) == 1 else []
        orders_of_axes = itertools.permutations(range(len(sizes))) if 1 < len(sizes) <= MOST_PARTS else ()
        for order in itertools.islice(orders_of_axes, 1, None):
            moved = tuple(sizes[axis] for axis in order)
            if sizes is new:
                sizes_read, axes = moved, tuple(order.index(axis) for axis in range(len(order)))
                text = f"an axis of {count} split as {moved}, then transposed by {axes}"
            else:
                sizes_read, axes = tuple(sizes), order
                text = f"axes {sizes_read} transposed by {axes}, then merged"
            parts = operand.reshape(outer, *sizes_read, -1)
            yield text, parts.transpose(0, *(1 + axis for axis in axes), len(axes) + 1).reshape(tuple(shape))
        outer *= count


def _matched(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the axes of one shape and of another one that hold the same elements, as few at a time as can be."""
    left, right = list(before), list(after)
    while left:
        old, new = [left.pop(0)], [right.pop(0)]
        while math.prod(old) != math.prod(new):
            if math.prod(old) < math.prod(new):
                old.append(left.pop(0))
            else:
                new.append(right.pop(0))
        yield old, new


def exchanged(weights: Arrays) -> Iterator[tuple[str, Rearranged]]:
    """Yield other orders of modules or weights next to each other, in all numbered layers and in each.

    Args:
        weights: name -> weight; the dots of a name separate modules.
    """
    for groups, ends in _alike(weights):
        for some in [groups, *([group] for group in groups if len(groups) > 1)]:
            names = [_named([group[at] for group in some]) for at in range(len(some[0]))]
            for text, order in orders_of(len(names)):
                moved = [at for at, source in enumerate(order) if at != source]
                pairs = [(group[at], group[order[at]]) for group in some for at in moved]
                mine = ", ".join(names[at] for at in moved)
                if len(moved) == 2:
                    for chosen, end in [(ends, ""), *(([end], end) for end in ends if end)]:
                        yield f"{' and '.join(names[at] + end for at in moved)} exchanged", _exchange(pairs, chosen)
                elif len(moved) <= MOST_PARTS:
                    yield f"{mine} in the order {', '.join(names[order[at]] for at in moved)}", _exchange(pairs, ends)
                else:
                    yield f"{names[0]} to {names[-1]} {text}", _exchange(pairs, ends)


def _alike(weights: Arrays) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Yield groups of modules or weights next to each other, and the ends of their weights' names, alike in a group.

    The same group of every numbered layer is yielded together; modules that hold most come first.
    """
    ends: dict[str, list[str]] = {}
    for name in weights:
        for match in re.finditer(r"\.|$", name):
            ends.setdefault(name[: match.start()], []).append(name[match.start() :])
    groups: dict[tuple[str, tuple[object, ...]], list[str]] = {}
    for path in sorted(ends, key=lambda path: path.count(".")):
        shapes = tuple((end, weights[f"{path}{end}"].shape) for end in sorted(ends[path]))
        groups.setdefault((path.rpartition(".")[0], shapes), []).append(path)
    layers: dict[object, list[list[str]]] = {}
    for (_, same), group in groups.items():
        is_numbered = group[0].rpartition(".")[2].isdigit()
        if len(group) > 1:
            key = group[0] if is_numbered else (*map(_in_layers, group), same)
            layers.setdefault(key, []).append(group)
    return ((alike, ends[alike[0][0]]) for alike in layers.values())


def _exchange(pairs: Sequence[tuple[str, str]], ends: Sequence[str]) -> Rearranged:
    """Return the change that replaces modules, the first of each pair, by others."""
    return lambda weights: {**weights, **{f"{to}{end}": weights[f"{of}{end}"] for to, of in pairs for end in ends}}


def _in_layers(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _named(paths: Sequence[str]) -> str:
    """Return the name of a module or weight, with * for the numbers of layers where there are several."""
    return paths[0] if len(paths) == 1 else _in_layers(paths[0])


def reordered(weights: Arrays, *, joined: bool = False) -> Iterator[tuple[str, Rearranged]]:
    """Yield weights in other orders along an axis, with the vectors next to them or alone, in all layers and in each.

    Args:
        weights: name -> weight; the dots of a name separate modules.
        joined: along several axes of a weight as if they were a single one.
    """
    layers: dict[object, list[str]] = {}
    for name, weight in weights.items():
        layers.setdefault((_in_layers(name), weight.shape), []).append(name)
    each = [[name] for alike in layers.values() if len(alike) > 1 for name in alike]
    for some in (list(layers.values()), each):
        ways = (way for names in some for way in _along_axes(weights, names, joined=joined))
        for turn in itertools.zip_longest(*ways):  # the simplest orders of all weights first
            yield from filter(None, turn)


def _along_axes(weights: Arrays, names: Sequence[str], *, joined: bool) -> Iterator[Iterator[tuple[str, Rearranged]]]:
    """Yield for each axis of some weights of one shape, or several axes, the orders of it."""
    shape = weights[names[0]].shape
    several = [(0, len(shape) - 1), (1, len(shape))] if len(shape) > 2 else []
    for start, end in several if joined else [(axis, axis + 1) for axis in range(len(shape))]:
        sizes = shape[start:end]
        which = f"axes {start} to {end - 1}" if joined else f"axis {start}"
        beside = [
            other
            for name in names
            for other, vector in weights.items()
            if other.rpartition(".")[0] == name.rpartition(".")[0] and vector.shape == sizes != shape
        ]
        for vectors in [beside, []] if beside else [[]]:
            others = dict.fromkeys(other if len(names) == 1 else _in_layers(other) for other in vectors)
            what = f"{which} of {' and of '.join([_named(names), *others])}"
            axes = {**dict.fromkeys(names, start), **dict.fromkeys(vectors, 0)}
            yield _in_orders(what, axes, sizes)


def _in_orders(what: str, axes: Mapping[str, int], sizes: tuple[int, ...]) -> Iterator[tuple[str, Rearranged]]:
    for text, order in orders_of(math.prod(sizes)):
        yield f"{what} {text}", _reorder(axes, sizes, order)


def _reorder(axes: Mapping[str, int], sizes: tuple[int, ...], order: Array) -> Rearranged:
    """Return the change that puts weights in another order from an axis on, along as many axes as there are sizes."""

    def change(weights: Arrays) -> Arrays:
        changed = dict(weights)
        for name, axis in axes.items():
            shape = weights[name].shape
            flat = weights[name].reshape(*shape[:axis], -1, *shape[axis + len(sizes) :])
            changed[name] = flat.take(order, axis).reshape(shape)
        return changed

    return change
