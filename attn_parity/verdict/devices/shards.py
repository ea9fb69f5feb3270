"""Relate a difference to shards of the side that devices share, and report copies that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ...pair import SIDES, Pair
from ...results.findings import Side, TensorVerdict
from ...samples.sampling import Sample
from ...sides.arrays import wide
from ...sides.shards import ShardCut, named, where
from ...sides.subject import Run
from ..measures import MEANING_LIMIT, scale_of
from ..notes import Findings
from ..runner import Live, Runner

TOUCHED = 1e-3
"""Part of a tensor's largest difference from which on an element differs, where a shard is looked for."""

MAX_ASKED = 8
"""Most shards of an output to test one by one for the gradients that come back from them."""


def copies_compared(findings: Findings, labels: Mapping[Side, str]) -> list[TensorVerdict]:
    """Return a verdict on each result of which devices hold copies that should be the same, and are not."""
    return [
        TensorVerdict(
            f"copies of {what}",
            f"copies of {what}",
            "copies",
            (),
            findings.verdicts[0].dtype,
            "different",
            f"devices of the {labels[side]} side that should hold the same do not: {how}",
        )
        for (side, what), how in findings.apart.items()
    ]


def on_shards(runner: Runner, findings: Findings) -> list[TensorVerdict]:
    """Return the verdicts, with the shards named in each difference that is confined to some shards."""
    verdicts, sample = findings.verdicts, findings.furthest
    if sample is None or not runner.live or all(one.verdict != "different" for one in verdicts):
        return verdicts
    dtype = verdicts[0].dtype
    low: dict[Side, Run] = {side: runner.run(side, sample, dtype) for side in SIDES}
    shared = shared_side(low)
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
    with_shards = []
    for verdict in verdicts:
        name = verdict.name if shared == "first" else verdict.second_name
        cut = cuts.get(name)
        confined = ""
        if verdict.verdict == "different" and verdict.name in aligned and cut is not None and cut.is_cut:
            tensor, of_shards = aligned[verdict.name], moved[verdict.name]
            apart = np.abs(wide(tensor.first) - wide(tensor.second))
            floor = max(MEANING_LIMIT * scale_of([tensor.first]), TOUCHED * float(apart.max(initial=0.0)))
            confined = where(~(apart <= floor), of_shards.first if shared == "first" else of_shards.second, cut)
        with_shards.append(
            dataclasses.replace(verdict, message=f"{verdict.message}; {confined}", shards=confined)
            if confined
            else verdict
        )
    if exact and all(one.verdict == "equal" for one in with_shards if one.name.startswith("output")):
        return _sent_back(runner, sample, with_shards, shared, shares.outputs)
    return with_shards


def _sent_back(
    runner: Runner, sample: Sample, verdicts: list[TensorVerdict], shared: Side, cuts: Sequence[ShardCut]
) -> list[TensorVerdict]:
    """Return the verdicts; name the output shards if only gradients coming back from some of them differ."""
    cut = next((one for one in cuts if one.is_cut), None)
    different = [one for one in verdicts if one.verdict == "different" and not one.shards]
    if not isinstance(runner, Live) or cut is None or cut.count > MAX_ASKED or not different:
        return verdicts
    outputs = runner.plain(shared, sample, different[0].dtype, exact=True).outputs
    numbers = [own.numbers(one.shape) if own == cut else None for own, one in zip(cuts, outputs, strict=True)]
    shards_of: dict[str, list[int]] = {one.name: [] for one in different}
    for number in range(cut.count):
        kept = [
            np.zeros(one.shape) if own is None else (own == number).astype(one.dtype)
            for own, one in zip(numbers, outputs, strict=True)
        ]
        runs = [runner.of_part(side, sample, different[0].dtype, kept) for side in SIDES]
        for name, tensor in runner.pair.aligned(*runs).items():
            apart = np.abs(wide(tensor.first) - wide(tensor.second)).max(initial=0.0) if name in shards_of else 0.0
            if name in shards_of and not float(apart) <= MEANING_LIMIT * scale_of([tensor.first]):
                shards_of[name].append(number)
    with_shards = []
    for verdict in verdicts:
        at = shards_of.get(verdict.name, [])
        if 0 < len(at) < cut.count:
            location = f"only in what comes back from {named(at, cut)}"
            verdict = dataclasses.replace(verdict, message=f"{verdict.message}; {location}", shards=location)
        with_shards.append(verdict)
    return with_shards


def is_askable(pair: Pair) -> bool:
    """Return whether further runs of a pair, in float64 and with other numbers, are quick and meaningful."""
    return not (pair.lacks or pair.effort.large or pair.train)


def shared_side(runs: Mapping[Side, Run]) -> Side | None:
    """Return the side whose results devices share; None if neither's."""
    return next((side for side in SIDES if runs[side].shares.any_cut), None)


def other_side(side: Side) -> Side:
    """Return the other one."""
    return "second" if side == "first" else "first"
