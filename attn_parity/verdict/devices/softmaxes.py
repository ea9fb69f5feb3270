"""Probe a softmax over the keys of several devices: identical tokens, and logits without values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from ...pair import SIDES
from ...results.findings import Side, shown
from ...samples.sampling import Sample
from ...sides.arrays import is_float, wide
from ...sides.subject import Array
from ..measures import MEANING_LIMIT, scale_of
from ..runner import Live
from .exchanges import agree
from .shards import is_askable

MAX_VECTORS = 12
"""Most parameters of one axis that are moved to observe their effect."""

LOW = -1e4
"""A logit that takes no part in a softmax."""

ROUNDED = 1e-6
"""Relative difference of outputs where a parameter was moved by a number that float32 rounds."""

MOST_KINDS = 2
"""Different outputs where all tokens are the same one: that of places which see keys, and of those which see none."""

WHY = "devices that let tokens meet in another way"


def mixed(runner: Live, sample: Sample, within: Mapping[Side, str], mesh: Mapping[str, int]) -> str:
    """Report how two sides differ if all tokens of an input are identical; "" if that shows nothing.

    Weights and order of tokens cannot matter then: either the sides agree, or the weights of one do not sum to one.

    Args:
        runner: runs both sides.
        sample: numbers on which they differ.
        within: path of the submodule that differs, on each side.
        mesh: axis of the mesh -> number of devices.
    """
    if not is_askable(runner.pair):
        return ""
    alike = _alike(sample)
    outputs = _outputs(runner, alike)
    if agree(outputs["first"], outputs["second"]):
        return (
            f"the sides agree where all tokens are the same one: consistent with {WHY} (order of gathered keys, hops "
            "of a ring and how they are merged, masks, positions)"
        )
    return _counted(runner, sample, within, mesh) or _not_adding_up(runner, alike, outputs, within)


def _alike(sample: Sample) -> Sample:
    """Return the sample with every token replaced by the first of its sequence."""
    arguments = {
        side: one.with_leaves([
            np.ascontiguousarray(np.broadcast_to(leaf[..., :1, :], leaf.shape))
            if is_float(leaf) and leaf.ndim > 1
            else leaf
            for leaf in one.leaves
        ])
        for side, one in sample.arguments.items()
    }  # fmt: skip
    return dataclasses.replace(sample, arguments=arguments)


def _outputs(runner: Live, sample: Sample) -> dict[Side, list[Array]]:
    weights = {side: runner.pair.weights(sample, side) for side in SIDES}
    runs = {side: runner.precisely(side, weights[side], sample.arguments[side]) for side in SIDES}
    return {side: [wide(one) for one in run.outputs] for side, run in runs.items()}


def _moved(runner: Live, sample: Sample, side: Side, within: str, by: float) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the vectors of a submodule, and the weights of a side with one of them moved."""
    weights, inside = runner.pair.weights(sample, side), f"{within}." if within else ""
    names = [name for name, one in weights.items() if name.startswith(inside) and one.ndim == 1 and is_float(one)]
    for name in names[:MAX_VECTORS]:
        yield name, {**weights, name: (wide(weights[name]) + by).astype(weights[name].dtype)}


def _counted(runner: Live, sample: Sample, within: Mapping[Side, str], mesh: Mapping[str, int]) -> str:
    """Recognise a logit that devices count once each: one side agrees once its own is so much larger."""
    outputs, labels = _outputs(runner, sample), runner.pair.labels
    for size in sorted({size for size in mesh.values() if size > 1}):
        axes = " or ".join(name for name, count in mesh.items() if count == size)
        for side, other in (SIDES, SIDES[::-1]):
            # A logit x that is counted n times weighs n exp(x) = exp(x + log(n)).
            for name, weights in _moved(runner, sample, side, within[side], math.log(size)):
                run = runner.precisely(side, weights, sample.arguments[side])
                if agree(outputs[other], [wide(one) for one in run.outputs], ROUNDED):
                    return (
                        f"the sides agree once {name} is log({size}) larger in {shown(labels[side])}: consistent with "
                        f"{shown(labels[other])} counting it {size} times in a softmax, once on each of the {size} "
                        f"devices of {axes}"
                    )
    return ""


def _not_adding_up(
    runner: Live, sample: Sample, outputs: Mapping[Side, list[Array]], within: Mapping[Side, str]
) -> str:
    """Report attention weights whose sums over devices are not 1; "" if no output shows it.

    Then the outputs of one side are equal at positions with equal tokens, and those of the other are not.
    """
    text = _uneven(outputs, runner.pair.labels)
    if text:
        return f"{text}: {_MERGED}"
    # A logit that carries no value takes its share from the others: there, places differ on both sides.
    first, second = (dict(_moved(runner, sample, side, within[side], LOW)) for side in SIDES)
    second_names = {one.first.source: one.second.source for one in runner.pair.pairing.matches}
    for name, weights in first.items():
        twin = second.get(second_names.get(name, ""))
        if twin is None:
            continue
        moved: dict[Side, list[Array]] = {}
        for side, side_weights in zip(SIDES, (weights, twin), strict=True):
            moved[side] = [wide(each) for each in runner.precisely(side, side_weights, sample.arguments[side]).outputs]
        text = _uneven(moved, runner.pair.labels)
        if text:
            return f"{text} once {name} is far below 0: {_MERGED}"
    return ""


_MERGED = (
    f"consistent with {WHY}, by weights of a softmax that do not add up to 1 (its parts merged with wrong weights, or "
    "counted twice)"
)


def _uneven(outputs: Mapping[Side, list[Array]], labels: Mapping[Side, str]) -> str:
    """Report a side whose outputs are equal at all positions of a sequence while those of the other vary; else "".

    Positions that see no key may differ from the rest on both sides.
    """
    for first, second in zip(outputs["first"], outputs["second"], strict=True):
        if first.shape != second.shape or first.ndim < 2:
            continue
        kinds: dict[Side, int] = {"first": _kinds(first), "second": _kinds(second)}
        side, other = sorted(SIDES, key=kinds.__getitem__)
        if kinds[side] <= MOST_KINDS and kinds[side] < kinds[other]:
            return (
                f"where all tokens are the same one, {shown(labels[side])} gives the same at every place, and "
                f"{shown(labels[other])} does not"
            )
    return ""


def _kinds(array: Array) -> int:
    """Return the number of distinct vectors along a sequence, counting up to one more than `MOST_KINDS`."""
    limit = MEANING_LIMIT * scale_of([array])
    distinct: list[Array] = []
    for position in range(array.shape[-2]):
        row = array[..., position, :]
        if all(float(np.abs(row - one).max(initial=0.0)) > limit for one in distinct):
            distinct.append(row)
        if len(distinct) > MOST_KINDS:
            break
    return len(distinct)
