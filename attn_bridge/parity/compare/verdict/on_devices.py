"""What a difference has to do with the devices that share a side: its shards, and copies that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..pair import SIDES
from ..results.findings import Side, TensorVerdict
from ..sides.dtypes import wide
from ..sides.shards import where
from ..sides.subject import Run
from .bench import Findings
from .limits import MEANING_LIMIT
from .measures import scale_of
from .runner import Runner

TOUCHED = 1e-3
"""Part of a tensor's largest difference from which on an element differs, where a shard is looked for."""


def copies_compared(found: Findings, shown: Mapping[Side, str]) -> list[TensorVerdict]:
    """Return a verdict on each result of which devices hold copies that should be the same, and are not."""
    return [
        TensorVerdict(
            f"copies of {what}",
            f"copies of {what}",
            "copies",
            (),
            found.verdicts[0].dtype,
            "different",
            f"devices of the {shown[side]} side that should hold the same do not: {how}",
        )
        for (side, what), how in found.apart.items()
    ]


def on_shards(runner: Runner, found: Findings) -> list[TensorVerdict]:
    """Return the verdicts; those on what differs on some shards alone say on which."""
    verdicts, sample = found.verdicts, found.furthest
    if sample is None or not runner.live or all(one.verdict != "different" for one in verdicts):
        return verdicts
    dtype = verdicts[0].dtype
    low: dict[Side, Run] = {side: runner.run(side, sample, dtype) for side in SIDES}
    shared = next((side for side in SIDES if low[side].shares.any_cut), None)
    if shared is None:
        return verdicts
    exact = not runner.pair.lacks
    runs = {side: runner.exact(side, sample, dtype) for side in SIDES} if exact else low
    shares = low[shared].shares
    numbers = dataclasses.replace(
        runs[shared],
        outputs=[cut.numbers(one.shape) for cut, one in zip(shares.outputs, runs[shared].outputs, strict=True)],
        parameter_gradients={
            name: shares.parameters[name].numbers(one.shape) if name in shares.parameters else np.zeros(one.shape)
            for name, one in runs[shared].parameter_gradients.items()
        },
    )
    cuts = {f"output{place}": cut for place, cut in zip(low[shared].structure, shares.outputs, strict=False)}
    cuts |= {f"grad {name}": cut for name, cut in shares.parameters.items()}
    aligned = runner.pair.aligned(runs["first"], runs["second"])
    moved = runner.pair.aligned(*(numbers if side == shared else runs[side] for side in SIDES))
    said = []
    for one in verdicts:
        name = one.name if shared == "first" else one.second_name
        cut = cuts.get(name)
        place = ""
        if one.verdict == "different" and one.name in aligned and cut is not None and cut.is_cut:
            tensor, of_shards = aligned[one.name], moved[one.name]
            apart = np.abs(wide(tensor.first) - wide(tensor.second))
            floor = max(MEANING_LIMIT * scale_of([tensor.first]), TOUCHED * float(apart.max(initial=0.0)))
            place = where(~(apart <= floor), of_shards.first if shared == "first" else of_shards.second, cut)
        said.append(dataclasses.replace(one, message=f"{one.message}; {place}", shards=place) if place else one)
    return said
