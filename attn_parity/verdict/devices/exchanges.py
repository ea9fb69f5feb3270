"""Whether two sides agree once devices have exchanged their parts of some parameters: then they read each other's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_bridge.printable import listed

from ...pair import SIDES
from ...results.findings import Side
from ...samples.sampling import Sample
from ...sides.arrays import wide
from ...sides.shards import ShardCut
from ...sides.subject import Array
from ..measures import MEANING_LIMIT, scale_of
from ..runner import Live
from .shards import is_askable, other_side, shared_side

MAX_TRIED = 256
"""Most sets of parameters that are tried."""


def exchanged(runner: Live, sample: Sample, within: Mapping[Side, str], mesh: Mapping[str, int]) -> str:
    """Report the parameters whose shards devices would have to exchange for the sides to agree; "" for none.

    Args:
        runner: runs both sides.
        sample: numbers on which they differ.
        within: path of the submodule that differs, on each side.
        mesh: axis of the mesh -> number of devices.
    """
    if not is_askable(runner.pair):
        return ""
    pair = runner.pair
    runs = {side: runner.plain(side, sample, pair.dtype, exact=True) for side in SIDES}
    shared = shared_side(runs)
    if shared is None:
        return ""
    other = other_side(shared)
    inside = f"{within[shared]}." if within[shared] else ""
    cuts = {name: cut for name, cut in runs[shared].shares.parameters.items() if name.startswith(inside)}
    unexchanged, arguments = pair.weights(sample, shared), sample.arguments[shared]
    wanted = [
        wide(one) for one in runner.precisely(other, pair.weights(sample, other), sample.arguments[other]).outputs
    ]
    shapes = {name: one.shape for name, one in unexchanged.items() if name.startswith(inside)}
    for way in itertools.islice(_ways(cuts, shapes, mesh), MAX_TRIED):
        weights = {**unexchanged, **{name: way.moved(unexchanged[name], at) for name, at in way.places.items()}}
        outputs = [wide(one) for one in runner.precisely(shared, weights, arguments).outputs]
        if agree(wanted, outputs):
            return (
                f"the sides agree once the {way.size} devices of {way.axis} exchange their parts of "
                f"{listed(list(way.places), 3)}: consistent with devices that use each other's"
            )
    return ""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange: of which parameters, along which of their axes, by how many parts.

    Attributes:
        places: name of a parameter -> the axis of it that devices share.
        axis: axis of the mesh.
        size: how many devices it has.
        outer: into how many groups of parts the axis of the parameter is cut; parts move within a group.
        shift: by how many devices parts move.
    """

    places: Mapping[str, int]
    axis: str
    size: int
    outer: int
    shift: int

    def moved(self, array: Array, at: int) -> Array:
        """Return an array with its parts exchanged."""
        shape = (*array.shape[:at], self.outer, self.size, -1, *array.shape[at + 1 :])
        return np.roll(array.reshape(shape), self.shift, at + 1).reshape(array.shape)


def _ways(
    cuts: Mapping[str, ShardCut], shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> Iterator[Exchange]:
    """Yield the possible exchanges between devices: of their parts, or of heads that they received for tokens."""
    several = sorted((name, size) for name, size in sizes.items() if size > 1)
    for axis, size in several:
        positions = {name: at for name, cut in cuts.items() if (at := _place(cut, axis)) is not None}
        owners: dict[str, list[str]] = {}
        for name in positions:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        sets = [[name] for name in positions]
        sets += [own for own in owners.values() if len(own) > 1]
        sets += [[*one, *two] for one, two in itertools.combinations(owners.values(), 2)]
        sets += [list(positions)] if len(owners) > 2 else []
        for shift in range(1, min(size, 3)):
            yield from (Exchange({name: positions[name] for name in one}, axis, size, 1, shift) for one in sets)
    for axis, size in several:
        alike: dict[tuple[int, int], dict[str, int]] = {}
        for name, shape in shapes.items():
            for at, width in enumerate(shape):
                outer = math.prod(count for _, count in cuts[name].axes[at]) if name in cuts else 1
                own = name in cuts and any(found == axis for found, _ in cuts[name].axes[at])
                if not own and width % (outer * size) == 0 and width > outer * size:
                    alike.setdefault((outer, width), {})[name] = at
        for shift in range(1, min(size, 3)):
            for count in (1, 2):
                for (outer, _), places in alike.items():
                    for names in itertools.combinations(places, count):
                        yield Exchange({name: places[name] for name in names}, axis, size, outer, shift)


def _place(cut: ShardCut, axis: str) -> int | None:
    """Return which axis of an array an axis of the mesh cuts, if it alone does."""
    return next((at for at, cuts in enumerate(cut.axes) if [name for name, _ in cuts] == [axis]), None)


def agree(arrays: Sequence[Array], other_arrays: Sequence[Array], limit: float = MEANING_LIMIT) -> bool:
    """Return whether two lists of arrays are the same but for a relative difference, by default float64's rounding."""
    return all(
        float(np.abs(first - second).max(initial=0.0)) <= limit * scale_of([first])
        for first, second in zip(arrays, other_arrays, strict=True)
    )
