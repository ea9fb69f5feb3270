"""Whether two sides agree once devices have exchanged their parts of some parameters: then they read each other's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..pair import SIDES
from ..results.findings import Side
from ..samples.sampling import Sample
from ..sides.dtypes import wide
from ..sides.shards import Cut
from ..sides.subject import Array
from .limits import MEANING_LIMIT
from .measures import scale_of
from .runner import Live

MAX_TRIED = 64
"""Most sets of parameters that are tried."""


def exchanged(runner: Live, sample: Sample, within: Mapping[Side, str]) -> str:
    """Say of which parameters devices have to exchange their parts for the two sides to agree; "" for none.

    Args:
        runner: runs both sides.
        sample: what they differ on.
        within: path of the submodule that differs, on each side.
    """
    pair = runner.pair
    if pair.lacks or pair.effort.large or pair.train:
        return ""
    runs = {side: runner.plain(side, sample, pair.dtype, exact=True) for side in SIDES}
    shared = next((side for side in SIDES if runs[side].shares.any_cut), None)
    if shared is None:
        return ""
    other: Side = "second" if shared == "first" else "first"
    inside = f"{within[shared]}." if within[shared] else ""
    cuts = {name: cut for name, cut in runs[shared].shares.parameters.items() if name.startswith(inside)}
    held, arguments = pair.weights(sample, shared), sample.arguments[shared]
    wanted = [
        wide(one) for one in runner.precisely(other, pair.weights(sample, other), sample.arguments[other]).outputs
    ]
    for names, axis, size, shift in itertools.islice(_ways(cuts), MAX_TRIED):
        weights = {**held, **{name: _rolled(held[name], cuts[name], axis, shift) for name in names}}
        outputs = [wide(one) for one in runner.precisely(shared, weights, arguments).outputs]
        if _agree(wanted, outputs):
            return (
                f"the sides agree once the {size} devices of {axis} exchange their parts of {_listed(names)}: "
                "consistent with devices that use each other's"
            )
    return ""


def _ways(cuts: Mapping[str, Cut]) -> Iterator[tuple[tuple[str, ...], str, int, int]]:
    """Return sets of parameters, the axis of the mesh that cuts them, its size, and by how many devices to move."""
    axes = {pair for cut in cuts.values() for axis in cut.axes for pair in axis if pair[1] > 1}
    for axis, size in sorted(axes):
        names = [name for name, cut in cuts.items() if _place(cut, axis) is not None]
        owners: dict[str, list[str]] = {}
        for name in names:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        sets = [(name,) for name in names]
        sets += [tuple(own) for own in owners.values() if len(own) > 1]
        sets += [(*one, *two) for one, two in itertools.combinations(owners.values(), 2)]
        sets += [tuple(names)] if len(owners) > 2 else []
        for shift in range(1, min(size, 3)):
            for one in sets:
                yield one, axis, size, shift


def _place(cut: Cut, axis: str) -> int | None:
    """Return which axis of an array an axis of the mesh cuts, if it alone does."""
    return next((at for at, cuts in enumerate(cut.axes) if [name for name, _ in cuts] == [axis]), None)


def _rolled(array: Array, cut: Cut, axis: str, shift: int) -> Array:
    at = _place(cut, axis)
    assert at is not None
    size = dict(cut.axes[at])[axis]
    return np.roll(array, shift * (array.shape[at] // size), at)


def _agree(one: Sequence[Array], two: Sequence[Array]) -> bool:
    return all(
        float(np.abs(first - second).max(initial=0.0)) <= MEANING_LIMIT * scale_of([first])
        for first, second in zip(one, two, strict=True)
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
