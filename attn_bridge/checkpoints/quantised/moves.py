"""Plans made by the names and shapes that layouts know, as what is read in the order of the file."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...printable import printable
from ..containers.base import CheckpointError
from ..containers.files import bad, c_strides
from ..copying import Axis, Move, move_of, pieces, source_runs
from .pairs import MXFP4, QuantisedTensor
from .reader import Dequantised

if TYPE_CHECKING:
    from ..planning.plans import Plan, Target


def in_file_order(plan: Plan, reader: Dequantised) -> Plan:
    """Return a plan that was made of `reader.headers` as one that is carried out with `reader`.

    Raises:
        CheckpointError: it keeps something aside that has another order in the file.
    """
    known = {one.name: one for one in reader.quantised.values()}
    for name in plan.dropped:
        if name in known and known[name].numbers != name:
            raise bad(reader.path, f"{printable(name)} would be kept aside, which can't be dequantised")
    targets = tuple(one if one.kept else _target(one, known, reader.dtype.name) for one in plan.targets)
    originals = tuple(
        dataclasses.replace(target, moves=tuple(_move(move, known) for move in target.moves))
        for target in plan.originals
    )
    ties = tuple((*(_move(one, known) for one in pair[:2]), *pair[2:]) for pair in plan.ties)
    scales = {one.numbers: one.others for one in known.values()}
    return dataclasses.replace(
        plan,
        targets=targets,
        originals=originals,
        ties=ties,  # type: ignore[arg-type]  # two moves and two names, as before
        dropped={**plan.dropped, **reader.dropped},
        notes=(*plan.notes, *notes_of(reader)),
        scales=scales,
    )


def rounding_losses(reader: Dequantised, target: Target, start: int, stop: int) -> int:
    """Return how many of the elements ``start:stop`` of a target rounding changes."""
    count = 0
    for move in target.moves:
        if target.kept or move.source not in reader.quantised:
            continue
        for piece in pieces(move, start, stop):
            run, around = source_runs(piece)
            outer, (rows, between) = (around[:-1], around[-1][:2]) if around else ([], (1, run))
            for first in _firsts(piece.source_offset, outer):
                count += reader.changed(piece.source, first, between, rows, run)
    return count


def _firsts(offset: int, axes: Sequence[Axis]) -> Iterator[int]:
    """Yield where the runs of a box begin in the source."""
    return (offset + sum(at) for at in itertools.product(*(range(0, size * step, step) for size, step, _ in axes)))


def _target(target: Target, known: dict[str, QuantisedTensor], dtype: str) -> Target:
    kinds = list(dict.fromkeys(known[move.source].words for move in target.moves if move.source in known))
    if not kinds:
        return target
    moves = sorted((_move(move, known) for move in target.moves), key=lambda move: move.target_offset)
    words = [f"dequantise {' and '.join(kinds)} to {dtype}"]
    words += ["rearrange"] if any(not move.is_plain for move in moves) else []
    words += [f"fuse {len(moves)}"] if len(moves) > 1 else []
    return dataclasses.replace(target, moves=tuple(moves), operation=", ".join(words))


def _move(move: Move, known: dict[str, QuantisedTensor]) -> Move:
    """Return a move out of a tensor as one out of the numbers in the file, whose axes may have another order."""
    one = known.get(move.source)
    if one is None or one.name == one.numbers:
        return move
    if not move.size:
        return dataclasses.replace(move, source=one.numbers)
    steps = c_strides(one.shape)
    offset, rest = 0, move.source_offset
    for step, stride in zip(steps, one.strides, strict=True):
        offset, rest = offset + rest // step * stride, rest % step
    axes = [part for axis in move.axes for part in _split(axis, steps, one)]
    moved = move_of(one.numbers, offset, move.target_offset, axes)
    return dataclasses.replace(moved, steps=move.steps, original=move.original)


def _split(axis: Axis, steps: Sequence[int], one: QuantisedTensor) -> list[Axis]:
    """Return an axis of a move as axes that each lie within one of the tensor's."""
    size, source, target = axis
    if size == 1:
        return []
    place = next(index for index, step in enumerate(steps) if step <= source and one.shape[index] > 1)
    room = steps[place] * one.shape[place] // source  # steps before the next axis begins
    if source % steps[place] or (size > room and size % room):
        raise CheckpointError(f"{printable(one.name)} {one.shape} can't be cut into axes of {size} by {source}")
    inner = min(size, room)
    within = (inner, source // steps[place] * one.strides[place], target)
    return [within, *_split((size // inner, source * inner, target * inner), steps, one)]


def _how(kind: str) -> str:
    if kind == MXFP4:
        return "two numbers to a byte times its scale"
    return "each number times its scale"


def notes_of(reader: Dequantised) -> list[str]:
    """Say what is dequantised."""
    kinds = collections.Counter(one.words for one in reader.quantised.values())
    return [
        f"{count} tensor{'s' if count > 1 else ''} of {kind} become{'' if count > 1 else 's'} {reader.dtype.name}, "
        f"{_how(kind)}, rounded once"
        for kind, count in kinds.items()
    ]
