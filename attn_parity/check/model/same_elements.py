"""Pair the parameters of two modules by their elements, loaded from one numbered checkpoint.

Each element of the checkpoint is a distinct number (`checkpoints.readers.NumberedReader`). Equal numbers on both sides
are the same element, however a side fused, split, transposed or reordered the tensor, and whatever its name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from attn_bridge.weights import Rule

from ...pairing import Cut, Match, Pairing, Tensor, whole
from ...pairing.tensors import c_strides
from ...sides.subject import Array, Arrays, SideWeight

MANY = 64
"""Most parts of a parameter."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """Positions along an axis of the second side, ``outer`` blocks of which a part is taken, and where they lie.

    Attributes:
        sizes: how many blocks, and how many positions of each.
        own: steps along the axis, in positions.
        start: first position.
        steps: steps on the first side, in elements.
        offset: where the first one lies there.
    """

    sizes: tuple[int, int]
    own: tuple[int, int]
    start: int
    steps: tuple[int, int]
    offset: int


def pair(
    first: Arrays,
    second: Arrays,
    first_parameters: Mapping[str, SideWeight],
    second_parameters: Mapping[str, SideWeight],
) -> Pairing | None:
    """Return the pairing that numbered weights imply; None unless both sides have the same elements.

    Args:
        first: the first side's weights.
        second: the second side's.
        first_parameters: the first side's parameters by name.
        second_parameters: the second side's.
    """
    if sum(one.size for one in first.values()) != sum(one.size for one in second.values()):
        return None
    names = list(first)
    starts = np.cumsum([0, *(first[name].size for name in names)])
    values = np.concatenate([first[name].reshape(-1) for name in names]) if names else np.zeros(0)
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    if (np.diff(ranked) == 0).any():
        return None
    matches: list[Match] = []
    for name, array in second.items():
        places = np.searchsorted(ranked, array.reshape(-1))
        if not array.size or (places >= ranked.size).any() or (ranked[places] != array.reshape(-1)).any():
            return None
        at = order[places].reshape(array.shape)
        owner = int(np.searchsorted(starts, at.flat[0], side="right")) - 1
        if at.min() < starts[owner] or at.max() >= starts[owner + 1]:
            return None
        source = names[owner]
        of_parameter = _matches(
            at - starts[owner], whole(source, first_parameters[source]), whole(name, second_parameters[name])
        )
        if of_parameter is None:
            return None
        matches += of_parameter
    order_of = {name: number for number, name in enumerate(names)}
    return Pairing(tuple(sorted(matches, key=lambda match: order_of[match.first.source])))


def _matches(at: Array, first: Tensor, second: Tensor) -> list[Match] | None:
    """Return the matches of one parameter of the second side, whose elements lie at `at` in one of the first side."""
    base = int(at.flat[0])
    columns = []
    for axis in range(at.ndim):
        index: list[int | slice] = [0] * at.ndim
        index[axis] = slice(None)
        columns.append(at[tuple(index)] - base)
    total = base + sum(
        (column.reshape([-1 if axis == own else 1 for axis in range(at.ndim)]) for own, column in enumerate(columns)),
        np.zeros([1] * at.ndim, np.int64),
    )
    if not np.array_equal(np.broadcast_to(total, at.shape), at):
        return None
    runs = [list(_runs(column)) for column in columns]
    count = math.prod(map(len, runs))
    if not count or count > MANY:
        return None
    own_strides = second.strides
    matches = []
    for number, chosen in enumerate(itertools.product(*runs)):
        axes = [
            (size, step, stride * own)
            for run, stride in zip(chosen, own_strides, strict=True)
            for size, step, own in zip(run.sizes, run.steps, run.own, strict=True)
            if size > 1 or math.prod(run.sizes) == 1
        ]
        axes.sort(key=lambda axis: -abs(axis[1]))
        shape = tuple(size for size, _, _ in axes)
        offset = base + sum(run.offset for run in chosen)
        own_offset = sum(run.start * stride for run, stride in zip(chosen, own_strides, strict=True))
        part = "" if count == 1 else f":{number}"
        ours = Cut(offset, tuple(step for _, step, _ in axes))
        theirs = Cut(own_offset, tuple(own for _, _, own in axes))
        mine = _cut(first, shape, ours, f"{first.name}[{second.name}{part}]")
        its = _cut(second, shape, theirs, f"{second.name}{f'[{number}]' if part else ''}")
        names = " ".join(f"a{axis}" for axis in range(len(mine.shape)))
        matches.append(Match(mine, its, Rule("torch", "flax", f"{names} -> {names}"), "checkpoint"))
    return matches


def _cut(tensor: Tensor, shape: tuple[int, ...], cut: Cut, name: str) -> Tensor:
    """Return a part of a parameter, or the parameter itself where the part is all of it, as it lies."""
    if cut.offset == 0 and math.prod(shape) == math.prod(tensor.shape):
        kept = [size for size in tensor.shape if size > 1]
        if kept == [size for size in shape if size > 1] and _plain(shape, cut.strides):
            return dataclasses.replace(tensor, shape=shape, cut=None if shape == tensor.shape else cut)
        return dataclasses.replace(tensor, shape=shape, cut=cut)
    return dataclasses.replace(tensor, name=name, shape=shape, cut=cut)


def _plain(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    pairs = zip(shape, strides, c_strides(shape), strict=True)
    return all(size == 1 or one == two for size, one, two in pairs)


def _runs(column: Array) -> Iterator[_Run]:
    """Yield the runs of an axis: its repeated block, in pieces of evenly spaced elements."""
    size = len(column)
    if _is_even(column):
        yield _Run((1, size), (size, 1), 0, (0, _step(column)), int(column[0]))
        return
    period = next(one for one in range(1, size + 1) if size % one == 0 and _repeats(column, one))
    blocks = size // period
    inner = column[:period]
    outer = int(column[period] - column[0]) if blocks > 1 else 0
    start = 0
    while start < period:
        stop = start + 1
        while stop < period and _is_even(inner[start : stop + 1]):
            stop += 1
        yield _Run((blocks, stop - start), (period, 1), start, (outer, _step(inner[start:stop])), int(inner[start]))
        start = stop


def _repeats(column: Array, period: int) -> bool:
    rows = column.reshape(-1, period)
    return np.array_equal(rows - rows[:, :1], np.broadcast_to(rows[0] - rows[0, 0], rows.shape)) and _is_even(
        rows[:, 0]
    )


def _is_even(column: Array) -> bool:
    steps = np.diff(column)
    return not len(steps) or bool((steps == steps[0]).all())


def _step(column: Array) -> int:
    return int(column[1] - column[0]) if len(column) > 1 else 1
