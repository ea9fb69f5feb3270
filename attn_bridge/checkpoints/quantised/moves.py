"""Dequantised tensors in the order of the file, for a plan's moves, or in that of layouts and adapters.

`in_file_order` makes a plan that reads numbers in the order of the file; `TurnedTensors` presents the checkpoint with
the names, shapes and order of its tensors, independently of the file.
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
from ..containers.files import bad, check_range
from ..containers.strided import c_strides
from ..copying import Axis, Move, move_of, pieces, source_runs
from ..readers import Wrapped
from .pairs import MXFP4, QuantisedTensor
from .reader import Dequantised
from .searching import notes_on_codes

if TYPE_CHECKING:
    from ..planning.plans import Plan, TargetTensor


def in_file_order(plan: Plan, reader: Dequantised) -> Plan:
    """Return a plan made from `reader.headers` in the form that reads from `reader`.

    Raises:
        CheckpointError: it keeps something aside that has another order in the file.
    """
    by_name = {one.name: one for one in reader.quantised.values()}
    for name in plan.dropped:
        if name in by_name and by_name[name].numbers != name:
            raise bad(reader.path, f"{printable(name)} would be kept aside, which can't be dequantised")
    targets = tuple(one if one.kept else _target(one, by_name, reader.dtype.name) for one in plan.targets)
    originals = tuple(
        dataclasses.replace(target, moves=tuple(_move(move, by_name) for move in target.moves))
        for target in plan.originals
    )
    ties = tuple((_move(first, by_name), _move(second, by_name), kept, left) for first, second, kept, left in plan.ties)
    scales = {one.numbers: one.others for one in by_name.values()}
    return dataclasses.replace(
        plan,
        targets=targets,
        originals=originals,
        ties=ties,
        dropped={**plan.dropped, **reader.dropped},
        notes=(*plan.notes, *notes_of(reader)),
        scales=scales,
    )


def rounding_losses(reader: Dequantised, target: TargetTensor, start: int, stop: int) -> int:
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


def _target(target: TargetTensor, by_name: dict[str, QuantisedTensor], dtype: str) -> TargetTensor:
    kinds = list(dict.fromkeys(by_name[move.source].words for move in target.moves if move.source in by_name))
    if not kinds:
        return target
    moves = sorted((_move(move, by_name) for move in target.moves), key=lambda move: move.target_offset)
    words = [f"dequantise {' and '.join(kinds)} to {dtype}"]
    words += ["rearrange"] if any(not move.is_plain for move in moves) else []
    words += [f"fuse {len(moves)}"] if len(moves) > 1 else []
    return dataclasses.replace(target, moves=tuple(moves), operation=", ".join(words))


def _move(move: Move, by_name: dict[str, QuantisedTensor]) -> Move:
    """Return a move out of a tensor as one out of the numbers in the file, whose axes may have another order."""
    tensor = by_name.get(move.source)
    if tensor is None or tensor.name == tensor.numbers:
        return move
    if not move.size:
        return dataclasses.replace(move, source=tensor.numbers)
    steps = c_strides(tensor.shape)
    offset, rest = 0, move.source_offset
    for step, stride in zip(steps, tensor.strides, strict=True):
        offset, rest = offset + rest // step * stride, rest % step
    axes = [part for axis in move.axes for part in _split(axis, steps, tensor)]
    moved = move_of(tensor.numbers, offset, move.target_offset, axes)
    return dataclasses.replace(moved, steps=move.steps, original=move.original)


def _split(axis: Axis, steps: Sequence[int], tensor: QuantisedTensor) -> list[Axis]:
    """Return an axis of a move as axes that each lie within one of the tensor's."""
    size, source, target = axis
    if size == 1:
        return []
    tensor_axis = next(index for index, step in enumerate(steps) if step <= source and tensor.shape[index] > 1)
    room = steps[tensor_axis] * tensor.shape[tensor_axis] // source  # steps before the next axis begins
    if source % steps[tensor_axis] or (size > room and size % room):
        raise CheckpointError(f"{printable(tensor.name)} {tensor.shape} can't be cut into axes of {size} by {source}")
    inner = min(size, room)
    within = (inner, source // steps[tensor_axis] * tensor.strides[tensor_axis], target)
    return [within, *_split((size // inner, source * inner, target * inner), steps, tensor)]


def notes_of(reader: Dequantised) -> list[str]:
    """Return notes on the dequantised tensors."""
    kinds = collections.Counter(one.words for one in reader.quantised.values())
    gone = reader.quantised.keys() | reader.dropped.keys()
    rest = {name: info for name, info in reader.tensors.items() if name not in gone}
    return notes_on_codes(rest) + [
        f"{count} tensor{'s' if count > 1 else ''} of {kind} become{'' if count > 1 else 's'} {reader.dtype.name}, "
        f"{'two numbers to a byte' if kind == MXFP4 else 'each number'} times its scale, rounded once"
        for kind, count in kinds.items()
    ]


class TurnedTensors(Wrapped):
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
        tensor = self.quantised.get(name)
        if tensor is None:
            return self.packed.read_range(name, start, stop)
        info = self.tensors[name]
        check_range(self.path, info, start, stop)
        if tensor.strides == c_strides(tensor.shape):
            return self.packed.read_range(tensor.numbers, start, stop)
        columns, width = info.shape[-1], info.itemsize
        first, last = start // (columns * width), -(-stop // (columns * width))
        rows = self._rows(tensor, first, last)
        return rows.reshape(-1).view(np.uint8).data[start - first * columns * width : stop - first * columns * width]

    def _rows(self, tensor: QuantisedTensor, first: int, last: int) -> Array:
        """Return rows of a tensor whose last two axes the file has in turn."""
        height, columns = tensor.shape[-2:]
        made = np.empty((last - first, columns), self.packed.dtype)
        row = first
        while row < last:
            matrix, top = divmod(row, height)
            count = min(last - row, height - top)
            turned = np.empty((columns, count), self.packed.dtype)
            self.packed.read_rows(tensor.numbers, matrix * height * columns + top, height, turned)
            made[row - first : row - first + count] = turned.T
            row += count
        return made

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into memory that exists."""
        into[:] = self.read_range(name, start, start + len(into))


def is_in_order(tensor: QuantisedTensor) -> bool:
    """Whether the file has a tensor as it is, or with its last two axes in turn."""
    if tensor.strides == c_strides(tensor.shape):
        return True
    leading, (height, columns) = tensor.shape[:-2], tensor.shape[-2:]
    front = tuple(size * height * columns for size in c_strides(leading))
    return len(tensor.shape) > 1 and tensor.strides == (*front, 1, height) and math.prod(tensor.shape) > 0


def dequantised_in(reader: Reader) -> Dequantised | None:
    """Return the dequantised checkpoint that a reader is, or shows in order; None where nothing is quantised."""
    inner = reader.packed if isinstance(reader, TurnedTensors) else reader
    return inner if isinstance(inner, Dequantised) else None
