"""Rows of attention that see no key: the result of a softmax on them is a convention, and models mask it.

``scores + finfo.min`` and ``where(mask, scores, finfo.min)`` give the same weights, but only the first passes gradients
back to the scores of a fully masked row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ..pair import SIDES
from ..samples.sampling import Sample
from ..sides.arrays import is_float, wide
from ..sides.subject import Array, CannotPromoteError, ModuleFailedError, Run
from .measures import are_close
from .runner import Live

# BERT added -10,000, which float16 can hold, where others add the least number of the dtype.
HIDDEN = -1e4
"""Additive masks hide keys by this much or more."""

AGREE = 1e-9
"""Relative difference below which both sides give the same, several times what float64 loses in a deep model."""

MAX_TRIALS = 8
"""Most sets of rows that are tried; each costs a run of both sides."""


def on_masked_rows(runner: Live, sample: Sample, fresh: Sample) -> str:
    """Return a message if the sides differ only on rows that see no key, "" if they differ elsewhere, too.

    Args:
        runner: runs both sides.
        sample: numbers on which they differ, masks among them.
        fresh: other numbers with the same masks. Other rows must agree on them, too: hard inputs alone hide differences
            where softmax gives one key all of the weight.
    """
    pair = runner.pair
    if pair.effort.large or pair.lacks or pair.train:
        return ""
    runs = [runner.exact(side, sample, pair.dtype) for side in SIDES]
    if _agree(runner, sample, runs, [np.ones((), bool)] * len(runs[0].outputs)):  # all rows do, as far as is told here
        return ""
    tried: list[Array] = []
    for rows in _rows(runner, sample):
        if rows.all():  # a mask in the wrong sense; without any row, everything agrees
            continue
        kept = [_kept(rows, one) for one in runs[0].outputs]
        if any(np.array_equal(rows, one) for one in tried) or all(one is None or one.all() for one in kept):
            continue
        if not any(one is None or one.any() for one in kept):  # nothing is left that could agree
            continue
        if len(tried) == MAX_TRIALS:
            break
        tried.append(rows)
        elsewhere = [np.ones((), bool) if one is None else one for one in kept]
        if _agree(runner, sample, runs, elsewhere) and _agree(
            runner, fresh, [runner.exact(side, fresh, pair.dtype) for side in SIDES], elsewhere
        ):
            return "it concerns only rows that see no key; masking the output makes them equal"
    return ""


def _agree(runner: Live, sample: Sample, runs: list[Run], kept: list[Array]) -> bool:
    """Return whether outputs and gradients agree where the rows are masked in the outputs."""
    pair = runner.pair
    masked = [[np.where(keep, wide(one), 0.0) for keep, one in zip(kept, run.outputs, strict=True)] for run in runs]
    if not are_close(masked[0], masked[1], AGREE):
        return False
    partial = {side: runner.of_part(side, sample, pair.dtype, kept) for side in SIDES}
    ours, theirs = (pair.pairing.aligned(partial[side].parameter_gradients, side) for side in SIDES)
    names = sorted(ours.keys() & theirs.keys())
    if not are_close([ours[name] for name in names], [theirs[name] for name in names], AGREE):
        return False
    inputs = [
        (one, two)
        for one, two in zip(partial["first"].input_gradients, partial["second"].input_gradients, strict=False)
        if one is not None and two is not None and one.shape == two.shape
    ]
    return are_close([one for one, _ in inputs], [two for _, two in inputs], AGREE)


def _kept(rows: Array, output: Array) -> Array | None:
    """Return which elements of an output are in other rows; None if it has no such rows."""
    shape = output.shape[: rows.ndim]
    if output.ndim < rows.ndim or any(size not in (1, wanted) for size, wanted in zip(rows.shape, shape, strict=True)):
        return None
    spread = np.broadcast_to(rows, shape).reshape(*shape, *([1] * (output.ndim - rows.ndim)))
    return np.broadcast_to(~spread, output.shape)


def _rows(runner: Live, sample: Sample) -> Iterator[Array]:
    """Yield the rows ``(batch, position)`` that may see no key, by every mask among the inputs of the first side."""
    arguments, names = sample.arguments["first"], runner.pair.subject("first").argument_names
    for leaf, name in zip(arguments.leaves, arguments.named(names), strict=True):
        for visible in _visible(leaf, is_named="mask" in name.lower()):
            if visible.ndim > 2 and visible.size == visible.shape[0] * visible.shape[-1]:  # (batch, 1, 1, keys)
                visible = visible.reshape(visible.shape[0], -1)
            if visible.ndim < 2 or visible.all() or not visible.any():
                continue
            if visible.ndim > 2 or visible.shape[0] == visible.shape[1]:  # (..., queries, keys)
                for seen in (visible, visible & np.tri(*visible.shape[-2:], dtype=np.bool_)):
                    rows: Array = np.logical_not(seen.any(-1))
                    while rows.ndim > 2:  # heads
                        rows = np.asarray(rows.any(1))
                    yield np.atleast_2d(rows)
            if visible.ndim == 2 and _hides(runner, sample, visible):  # (batch, keys)
                # Rows before the first visible key, which causal attention leaves without any; then hidden tokens; then
                # sequences that are hidden as a whole.
                yield ~np.logical_or.accumulate(visible, -1)
                yield ~visible
                yield np.logical_not(visible.any(-1, keepdims=True))


def _hides(runner: Live, sample: Sample, visible: Array) -> bool:
    """Return whether the first side reads a mask so: results of shown tokens follow shown tokens, not hidden ones.

    In the opposite sense nearly all rows would see no key, and any difference would be theirs.
    """
    call, results = sample.arguments["first"], []
    others = [[_with_others(leaf, kept) for leaf in call.leaves] for kept in (visible, ~visible)]
    if any(all(old is new for old, new in zip(call.leaves, leaves, strict=True)) for leaves in others):
        return False
    for leaves in (call.leaves, *others):
        moved = dataclasses.replace(sample, arguments={**sample.arguments, "first": call.with_leaves(leaves)})
        try:
            outputs = runner.exact("first", moved, runner.pair.dtype).outputs
        except (ModuleFailedError, CannotPromoteError):
            return False
        kept = [_kept(~visible, output) for output in outputs]
        results.append([
            np.where(True if keep is None else keep, wide(output), 0.0)
            for keep, output in zip(kept, outputs, strict=True)
        ])  # fmt: skip
    unchanged, without_hidden, without_shown = results
    return are_close(unchanged, without_hidden, AGREE) and not are_close(unchanged, without_shown, AGREE)


def _with_others(leaf: Array, visible: Array) -> Array:
    """Return numbers with others at the hidden tokens, where they have a row or a whole number for each token."""
    if leaf.shape[:2] != visible.shape or np.isin(leaf, (0, 1)).all():
        return leaf
    moved = np.flip(np.roll(leaf, 1, axis=1), axis=0)
    spread = visible.reshape(*visible.shape, *([1] * (leaf.ndim - 2)))
    return leaf if np.array_equal(np.where(spread, leaf, moved), leaf) else np.where(spread, leaf, moved)


def _visible(leaf: Array, *, is_named: bool) -> Iterator[Array]:
    """Yield the keys that a mask may show, in both senses of booleans; zeros and ones are a mask by their name."""
    if leaf.dtype == bool:
        yield leaf
        yield ~leaf
    elif is_named and np.isin(leaf, (0, 1)).all():
        yield leaf != 0
    elif is_float(leaf) and ((leaf == 0) | (leaf <= HIDDEN)).all():
        yield leaf == 0
