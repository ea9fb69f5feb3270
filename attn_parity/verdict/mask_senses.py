"""Masks that two sides read in opposite senses: torch's hide where they are True, Flax's show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ..pair import SIDES
from ..results.findings import Side
from ..samples.sampling import Sample
from ..sides.subject import CannotPromoteError, ModuleFailedError
from .masked_rows import AGREE
from .measures import are_close
from .runner import Live

MAX_TRIALS = 8
"""Most masks that are changed; each costs a run of one side."""


def on_mask_senses(runner: Live, sample: Sample, fresh: Sample) -> str:
    """Return the change of a mask on one side that makes both agree, "" if none does.

    Args:
        runner: runs both sides.
        sample: numbers on which they differ, masks among them.
        fresh: other numbers with the same masks, on which they must agree by the change, too.
    """
    pair = runner.pair
    if pair.effort.large or pair.lacks or pair.train:
        return ""
    if _agree(runner, sample, "first", sample):  # with the masks as they are, as far as is told here
        return ""
    for trial, changes in enumerate(zip(_changed(runner, sample), _changed(runner, fresh), strict=True)):
        if trial == MAX_TRIALS:
            break
        if all(_agree(runner, of_sample, side, changed)
               for of_sample, (side, _, changed) in zip((sample, fresh), changes, strict=True)):  # fmt: skip
            return changes[0][1]
    return ""


def _agree(runner: Live, sample: Sample, changed_side: Side, changed: Sample) -> bool:
    """Return whether both sides agree where one of them runs on a changed sample."""
    pair = runner.pair
    try:
        runs = [runner.exact(side, changed if side == changed_side else sample, pair.dtype) for side in SIDES]
    except (ModuleFailedError, CannotPromoteError):  # code that refuses the other mask
        return False
    tensors = list(pair.aligned(*runs).values())
    outputs = [tensor for tensor in tensors if tensor.kind == "output"]
    gradients = [tensor for tensor in tensors if tensor.kind != "output"]
    return all(
        are_close([tensor.first for tensor in some], [tensor.second for tensor in some], AGREE)
        for some in (outputs, gradients)
    )


def _changed(runner: Live, sample: Sample) -> Iterator[tuple[Side, str, Sample]]:
    """Yield (side, message if the sides then agree, sample with one mask of this side inverted or transposed)."""
    for side in SIDES:
        call, label = sample.arguments[side], runner.pair.shown[side]
        for i, name in enumerate(call.named(runner.pair.subject(side).argument_names)):
            mask = call.leaves[i]
            if not (mask.dtype == bool or ("mask" in name.lower() and np.isin(mask, (0, 1)).all())) or mask.ndim < 2:
                continue
            hidden_value = "True" if mask.dtype == bool else "1"
            senses = f"{hidden_value} hides a key on one side, and shows it on the other"
            inverted = f"inverting `{name}` of {label} makes both sides agree: {senses}"
            ways = [(inverted, np.logical_not(mask).astype(mask.dtype))]
            if mask.shape[-1] == mask.shape[-2]:
                ways.append((f"transposing `{name}` of {label} makes both sides agree", mask.swapaxes(-1, -2)))
            for text, other in ways:
                leaves = [other if j == i else leaf for j, leaf in enumerate(call.leaves)]
                yield (
                    side,
                    text,
                    dataclasses.replace(sample, arguments={**sample.arguments, side: call.with_leaves(leaves)}),
                )
