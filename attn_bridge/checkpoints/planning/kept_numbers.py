"""Numbers as they were before a conversion scaled them, which rounding would not give back: kept in the shape of ours.

A kept tensor is called ``numbers-KIND/OURS``: the kind is the layout whose numbers these are, or ``plain`` where they
are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...printable import printable
from ...weights.changes import Change, is_float
from ...weights.rows import Placement, refined
from ..containers.base import CheckpointError, TensorInfo, numpy_dtype
from ..copying import Move, dense, move_of
from ..manifest import Manifest

PREFIX, PLAIN = "numbers-", "plain"


def kind_of(layout: str, change: Change | None) -> str:
    """Return whose numbers a layout holds."""
    return PLAIN if change is None else layout


def original(part: str, here: Placement, kind: str, dtype: str) -> tuple[TensorInfo, Move]:
    """Return what is kept of one of our tensors: its numbers as the source has them.

    Raises:
        CheckpointError: they are no numbers that can be scaled.
    """
    if not is_float(numpy_dtype(dtype)):
        raise CheckpointError(f"{here.theirs} ({dtype}) would have to be scaled, which takes floating-point numbers")
    move = move_of(here.theirs, here.offset, 0, refined(here.axes, dense(here.shape)))
    return TensorInfo(f"{PREFIX}{kind}/{part}", dtype, here.shape), move


def find(manifest: Manifest | None, parts: Iterable[str], kind: str, there: Placement) -> Move | None:
    """Return the move that takes kept numbers of that kind to a target, by the first of several names of ours.

    What was kept is taken only where it fits; its numbers are held against the source's as they are read.
    """
    if manifest is None or manifest.kept is None:
        return None
    for part in parts:
        info = manifest.kept.tensors.get(f"{PREFIX}{kind}/{part}")
        if info is not None and tuple(info.shape) == there.shape and is_float(numpy_dtype(info.dtype)):
            return move_of(info.name, 0, there.offset, refined(dense(there.shape), there.axes))
    return None


def carried(manifest: Manifest | None, kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Return what was kept before and goes along: all but what the target holds by itself.

    Args:
        manifest: what an earlier conversion wrote.
        kinds: our name -> the kind of the numbers that the target holds of it.
    """
    if manifest is None or manifest.kept is None:
        return ()
    split = ((name, *name.removeprefix(PREFIX).partition("/")) for name in manifest.kept.tensors)
    return tuple(name for name, kind, _, part in split if name.startswith(PREFIX) and kinds.get(part) != kind)


def notes(rounded: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Say which tensors of a target hold numbers that are scaled, if any.

    Args:
        rounded: their names, but for those of `taken`.
        taken: names of tensors whose numbers were kept aside on the way there.
    """
    found = []
    if rounded:
        found.append(
            f"{_first_of(rounded, 'hold')} numbers that are scaled or shifted, and so rounded; those of the source are "
            "kept aside, and the way back takes them"
        )
    if taken:
        found.append(
            f"{_first_of(taken, 'take')} the numbers that were kept aside, but for those that have changed since, "
            "which are computed and rounded"
        )
    return found


def _first_of(names: Sequence[str], verb: str) -> str:
    return (
        f"{printable(names[0])} and {len(names) - 1} more {verb}"
        if len(names) > 1
        else f"{printable(names[0])} {verb}s"
    )
