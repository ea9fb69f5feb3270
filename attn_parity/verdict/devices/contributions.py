"""Which devices' contributions to a gradient are lost: a parameter is zero but for the part of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from ...pair import SIDES
from ...results.findings import Side, shown
from ...samples.sampling import Sample
from ...sides.arrays import wide
from ...sides.shards import ShardCut
from ...sides.subject import Array, Run
from ..measures import MEANING_LIMIT, scale_of
from ..runner import Live
from .shards import is_askable, other_side, shared_side

MAX_TRIED = 12
"""Most parameters whose parts are kept one at a time."""

MAX_PARTS = 8
"""Most devices that share a parameter of which this is tried."""


@dataclasses.dataclass(frozen=True)
class SharedParameter:
    """A parameter that the devices of one axis share, each a part.

    Attributes:
        name: on the first side.
        axis: of the mesh.
        parts: the number of the device that holds each element, with the first side's axes.
        count: how many there are.
    """

    name: str
    axis: str
    parts: Array
    count: int


def lost(runner: Live, sample: Sample, within: Mapping[Side, str]) -> str:
    """Report the devices through whose shards of a parameter a gradient is lost; "" if no parameter shows it.

    With a parameter zeroed except for one device's shard, every gradient comes back through that device. If the
    gradient then agrees for some devices and not for others, it is not summed over them; likewise if it reaches the
    shards of other devices on one side alone.

    Args:
        runner: runs both sides.
        sample: numbers on which they differ.
        within: path of the submodule that differs, on each side.
    """
    if not is_askable(runner.pair):
        return ""
    runs = {side: runner.plain(side, sample, runner.pair.dtype, exact=True) for side in SIDES}
    side = shared_side(runs)
    if side is None:
        return ""
    parameters = list(_shared(runner, sample, runs, side))
    inside = f"{within['first']}." if within["first"] else ""
    for parameter in [each for each in parameters if each.name.startswith(inside)][:MAX_TRIED]:
        text = _lost_through(runner, sample, parameter, parameters, side)
        if text:
            return text
    return ""


def _shared(runner: Live, sample: Sample, runs: Mapping[Side, Run], side: Side) -> Iterator[SharedParameter]:
    """Yield the parameters that the devices of one axis share, those that take part last in a module first."""
    cuts: dict[str, ShardCut] = runs[side].shares.parameters
    numbered = {
        name: cuts[name].numbers(one.shape) if name in cuts else np.zeros(one.shape)
        for name, one in runs[side].parameter_gradients.items()
    }
    numbers = dataclasses.replace(runs[side], parameter_gradients=numbered)
    moved = runner.pair.aligned(*(numbers if one == side else runs[one] for one in SIDES))
    for name, aligned in reversed(moved.items()):
        own = name if side == "first" else aligned.second_name
        cut, parameter = cuts.get(own.removeprefix("grad ")), name.removeprefix("grad ")
        axes = [] if cut is None else [axis for cuts_of in cut.axes for axis, size in cuts_of if size > 1]
        parts = aligned.first if side == "first" else aligned.second
        array = sample.weights.get(parameter)
        if cut is not None and len(axes) == 1 and array is not None and array.shape == parts.shape:
            yield SharedParameter(parameter, axes[0], parts, cut.count)


def _lost_through(
    runner: Live, sample: Sample, shared: SharedParameter, parameters: list[SharedParameter], side: Side
) -> str:
    """Describe a gradient that devices do not add up, by keeping a single device's part of a parameter; "" if none is.

    Args:
        runner: runs the pair.
        sample: numbers on which the sides differ.
        shared: the parameter, all other parts of which are zero.
        parameters: all that devices share, whose gradients show how far a part reaches.
        side: the side on many devices.
    """
    pair = runner.pair
    plain = other_side(side)
    if shared.count > MAX_PARTS:
        return ""
    differing: list[list[str]] = []
    missing: dict[str, int] = {}
    for part in range(shared.count):
        kept = np.where(shared.parts == part, sample.weights[shared.name], 0).astype(sample.weights[shared.name].dtype)
        moved = dataclasses.replace(sample, weights={**sample.weights, shared.name: kept})
        runs = [runner.exact(each, moved, pair.dtype) for each in SIDES]
        tensors = pair.aligned(*runs)
        limits = {name: MEANING_LIMIT * scale_of([tensor.first]) for name, tensor in tensors.items()}
        apart = {
            name: float(np.abs(wide(tensor.first) - wide(tensor.second)).max(initial=0.0))
            for name, tensor in tensors.items()
        }
        # Negated, so that NaN counts as different.
        differing.append([name for name, distance in apart.items() if not distance <= limits[name]])
        for other in parameters:
            tensor = tensors.get(f"grad {other.name}")
            elsewhere = other.parts != part
            if tensor is None or other.axis != shared.axis or other.name == shared.name or not elsewhere.any():
                continue
            sides = {"first": wide(tensor.first)[elsewhere], "second": wide(tensor.second)[elsewhere]}
            reached = {each: float(np.abs(array).max()) for each, array in sides.items()}
            limit = limits[f"grad {other.name}"]
            if reached[side] <= limit < reached[plain]:
                missing[other.name] = missing.get(other.name, 0) + 1
    axis, label = shared.axis, shown(pair.labels[side])
    whole = [name for name, count in missing.items() if count == shared.count]
    if whole:
        return (
            f"what comes back through the part of {shared.name} on one device of {axis} does not reach the parts of "
            f"{whole[0]} on the others in {label}: consistent with a gradient that is not added up over the "
            f"{shared.count} devices of {axis}"
        )
    right = [part for part, names in enumerate(differing) if not names]
    if (
        right
        and len(right) < shared.count
        and not any(name.startswith("output") for names in differing for name in names)
    ):
        gradient = next(names for names in differing if names)[0]
        return (
            f"{gradient} agrees where {shared.name} is zero but for its part on device {', '.join(map(str, right))} of "
            f"{axis}, and not where another part is kept: consistent with a gradient in {label} that is not added up "
            f"over the {shared.count} devices of {axis}"
        )
    return ""
