"""A region of a target tensor as a target of its own, so that who holds no more than that reads no more."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ...weights import Region
from ..copying import Axis, Move, move_of, pieces
from .plans import Target


def part_of(target: Target, region: Region) -> Target | None:
    """Return what is to be read for a region of a target; None where it can't be told from the whole.

    Moves are boxes, and so is what a region has in common with one, also where tensors are split, fused or transposed.
    """
    shape = target.info.shape
    sizes = tuple(stop - start for start, stop in region)
    info = dataclasses.replace(target.info, shape=sizes)
    if not math.prod(sizes):
        return dataclasses.replace(target, info=info, moves=())
    here, there = _strides(shape), _strides(sizes)
    moves: list[Move] = []
    for move in target.moves:
        if move.original is not None:  # numbers kept aside lie as the whole does
            return None
        axes = _by_axis(move, shape, here)
        if axes is None:
            return None
        for source, starts, boxes in _inside(move, axes, region, shape, here):
            offset = sum((at - first) * step for at, (first, _), step in zip(starts, region, there, strict=True))
            own = [(size, one, two * step) for box, step in zip(boxes, there, strict=True) for size, one, two in box]
            moves.append(dataclasses.replace(move_of(move.source, source, offset, own), steps=move.steps))
    return dataclasses.replace(target, info=info, moves=tuple(moves))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _by_axis(move: Move, shape: Sequence[int], strides: Sequence[int]) -> list[list[Axis]] | None:
    """Return a move's axes by the target's axis that each runs along, with strides in that; None where one does not."""
    found: list[list[Axis]] = [[] for _ in shape]
    for size, here, there in move.axes:
        while size > 1:
            along = [axis for axis, step in enumerate(strides) if step <= there < step * shape[axis]]
            if not along:
                return None
            axis = along[0]
            room, rest = divmod(strides[axis] * shape[axis], there)
            count = min(size, room)
            if there % strides[axis] or (size > room and (rest or size % room)):
                return None
            found[axis].append((count, here, there // strides[axis]))
            size, here, there = size // count, here * count, there * count
    for axis, box in enumerate(found):
        first = move.target_offset // strides[axis] % shape[axis]
        if first + sum((size - 1) * step for size, _, step in box) >= shape[axis]:
            return None
    return found


def _inside(
    move: Move, axes: Sequence[list[Axis]], region: Region, shape: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[int, list[int], list[tuple[Axis, ...]]]]:
    """Yield the boxes of a move inside a region: place in the source, first element and axes along each target axis."""
    found: list[tuple[int, list[int], list[tuple[Axis, ...]]]] = [(move.source_offset, [], [])]
    for axis, (start, stop) in enumerate(region):
        first = move.target_offset // strides[axis] % shape[axis]
        box = tuple(sorted(axes[axis], key=lambda one: -one[2]))
        along = list(pieces(Move(move.source, 0, first, box), start, stop))
        found = [
            (source + one.source_offset, [*starts, one.target_offset], [*boxes, one.axes])
            for source, starts, boxes in found
            for one in along
        ]
    yield from found
