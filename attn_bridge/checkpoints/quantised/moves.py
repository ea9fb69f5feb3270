"""Dequantised tensors in the order of the file, for a plan's moves, or in that of layouts and adapters.

`in_file_order` makes a plan that reads numbers in the order of the file; `InOrder` presents the checkpoint with the
names, shapes and order of its tensors, independently of the file.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...printable import printable
from ..containers.base import Array, CheckpointError, Reader
from ..containers.files import bad, c_strides, check_range
from ..copying import Axis, Move, move_of, pieces, source_runs
from ..readers import Wrapped
from .pairs import MXFP4, QuantisedTensor, c_order
from .reader import Dequantised

if TYPE_CHECKING:
    from ..planning.plans import Plan, Target


def in_file_order(plan: Plan, reader: Dequantised) -> Plan:
    """Return a plan made from `reader.headers` in the form that reads from `reader`.

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
    """Return notes on the dequantised tensors."""
    kinds = collections.Counter(one.words for one in reader.quantised.values())
    return [
        f"{count} tensor{'s' if count > 1 else ''} of {kind} become{'' if count > 1 else 's'} {reader.dtype.name}, "
        f"{_how(kind)}, rounded once"
        for kind, count in kinds.items()
    ]


class InOrder(Wrapped):
    """Tensors of a dequantised checkpoint, each with its last two axes turned back where the file has them turned.

    Args:
        packed: the checkpoint.

    Attributes:
        packed: the same.
        quantised: name of a tensor -> how it is quantised.
    """

    def __init__(self, packed: Dequantised):
        super().__init__(packed)
        self.packed = packed
        self.tensors = packed.headers.tensors
        self.quantised: dict[str, QuantisedTensor] = {one.name: one for one in packed.quantised.values()}

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        one = self.quantised.get(name)
        if one is None:
            return self.packed.read_range(name, start, stop)
        info = self.tensors[name]
        check_range(self.path, info, start, stop)
        if one.strides == c_order(one.shape):
            return self.packed.read_range(one.numbers, start, stop)
        columns, width = info.shape[-1], info.itemsize
        first, last = start // (columns * width), -(-stop // (columns * width))
        rows = self._rows(one, first, last)
        return rows.reshape(-1).view(np.uint8).data[start - first * columns * width : stop - first * columns * width]

    def _rows(self, one: QuantisedTensor, first: int, last: int) -> Array:
        """Return rows of a tensor whose last two axes the file has in turn."""
        height, columns = one.shape[-2:]
        made = np.empty((last - first, columns), self.packed.dtype)
        row = first
        while row < last:
            matrix, top = divmod(row, height)
            count = min(last - row, height - top)
            turned = np.empty((columns, count), self.packed.dtype)
            self.packed.read_rows(one.numbers, matrix * height * columns + top, height, turned)
            made[row - first : row - first + count] = turned.T
            row += count
        return made

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into memory that exists."""
        into[:] = self.read_range(name, start, start + len(into))


def is_in_order(one: QuantisedTensor) -> bool:
    """Whether the file has a tensor as it is, or with its last two axes in turn."""
    if one.strides == c_order(one.shape):
        return True
    leading, (height, columns) = one.shape[:-2], one.shape[-2:]
    front = tuple(size * height * columns for size in c_order(leading))
    return len(one.shape) > 1 and one.strides == (*front, 1, height) and math.prod(one.shape) > 0


def dequantised_in(reader: Reader) -> Dequantised | None:
    """Return the dequantised checkpoint that a reader is, or shows in order; None where nothing is quantised."""
    inner = reader.packed if isinstance(reader, InOrder) else reader
    return inner if isinstance(inner, Dequantised) else None
