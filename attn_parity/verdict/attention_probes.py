"""Faults of attention that the numbers of one submodule can't show: dependence on later tokens, and missing scales.

The modules of the two sides may be split in different ways, so that queries, keys and values are known on neither; but
both sides can be run again, with other tokens or other weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from ..pair import SIDES, Pair
from ..pairing import Match
from ..results.findings import Side
from ..samples import calls
from ..samples.sampling import Sample
from ..sides.arrays import is_float, wide
from ..sides.subject import Arguments, Array, CannotPromoteError, ModuleFailedError
from .measures import are_close, scale_of
from .runner import Live

MOVED = 1e-9
"""An output depends on a change if it moves by more than this share of the largest output."""

AGREE = 1e-6
"""Relative difference below which sides agree once a scale is corrected; tables of float32 may differ by less."""

ALL_WIDTHS = 128
"""Largest axis of a query's weight all of whose divisors are tried as widths; each costs a run of both sides."""

LIKELY_WIDTHS = (16, 257)
"""Range of the widths that are tried of larger ones."""

_QUERY = re.compile(r"(?:^|[._\[])(?:w?q|query)(?:_?proj)?(?:[._\]]|$)")


def on_attention(runner: Live, sample: Sample) -> str:
    """Return what runs with other tokens or scales show of a fault of attention, "" without one.

    Args:
        runner: runs both sides.
        sample: numbers on which they differ.
    """
    pair = runner.pair
    if pair.effort.large or pair.lacks or pair.train:
        return ""
    try:
        before = {side: _outputs(runner, side, sample) for side in SIDES}
        if [one.shape for one in before["first"]] != [one.shape for one in before["second"]]:
            return ""
        return _on_later_tokens(runner, sample, before) or _on_scale(runner, sample, before)
    except (ModuleFailedError, CannotPromoteError):  # code that refuses other numbers than the given ones
        return ""


def _outputs(runner: Live, side: Side, sample: Sample) -> list[Array]:
    weights = runner.pair.weights(sample, side)
    return [wide(one) for one in runner.precisely(side, weights, sample.arguments[side]).outputs]


# ---- causality


def _on_later_tokens(runner: Live, sample: Sample, before: dict[Side, list[Array]]) -> str:
    """Recognise a mask that is causal on one side alone: only on the other a later token moves an output."""
    pair, made = runner.pair, before["first"][0]
    changed = _with_token_changed(pair, sample, made, -1)
    if changed is None:
        return ""
    first: dict[Side, int] = {}
    for side in SIDES:
        apart = np.abs(_outputs(runner, side, changed)[0] - before[side][0])
        moved = (apart > MOVED * scale_of([before[side][0]])).any(axis=tuple(i for i in range(apart.ndim) if i != 1))
        if not moved[-1]:  # the token does not reach its own output: these are no sequences
            return ""
        first[side] = int(np.argmax(moved))
    last = made.shape[1] - 1
    causal = [side for side in SIDES if first[side] == last]
    if len(causal) != 1:
        return ""
    if not _depends_on_earlier_tokens(runner, causal[0], sample, before[causal[0]][0]):
        return ""
    other: Side = "second" if causal[0] == "first" else "first"
    return (
        f"in {pair.shown[other]} the output at position {first[other]} depends on the token at position {last}, in "
        f"{pair.shown[causal[0]]} only the output at position {last} does"
    )


def _depends_on_earlier_tokens(runner: Live, side: Side, sample: Sample, before: Array) -> bool:
    """Return whether the first token moves the last output: a side that mixes no tokens is causal without a mask."""
    changed = _with_token_changed(runner.pair, sample, before, 0)
    if changed is None:
        return False
    apart = np.abs(_outputs(runner, side, changed)[0] - before)[:, -1]
    return bool((apart > MOVED * scale_of([before])).any())


def _with_token_changed(pair: Pair, sample: Sample, output: Array, at: int) -> Sample | None:
    """Return a sample in which the first (0) or last (-1) token of every sequence is another.

    None where no input holds sequences.
    """
    call = sample.arguments["first"]
    shared = set(map(calls.place_index, pair.same_inputs))
    masks = calls.masks(call)
    lengths = [
        leaf.shape[:2]
        for place, leaf in enumerate(call.leaves)
        if place in shared and not masks[place] and leaf.ndim > (1 if leaf.dtype.kind in "iu" else 2)
    ]
    if not lengths or output.ndim < 3 or output.shape[:2] != lengths[0] or output.shape[1] < 3:
        return None
    leaves = [
        _changed(leaf, at) if leaf.shape[:2] == lengths[0] and place in shared and not masks[place] else leaf
        for place, leaf in enumerate(call.leaves)
    ]
    first = call.with_leaves(leaves)
    arguments: dict[Side, Arguments] = {"first": first}
    arguments["second"] = calls.like(sample.arguments["second"], first, pair.same_inputs)
    return Sample(sample.weights, arguments, sample.planned)


def _changed(leaf: Array, at: int) -> Array:
    """Return tokens of which the first or last is one that the sequence has elsewhere, or numbers turned and moved."""
    changed = leaf.copy()
    if is_float(leaf):
        # A negative factor: norms undo a shift, and a scale above 0.
        changed[:, at] = np.asarray(0.5 - wide(leaf[:, at]) * 1.5).astype(leaf.dtype)
        return changed
    others = leaf[:, 1:] if at == 0 else leaf[:, :-1]
    differs = others != leaf[:, at, None]  # a token that the sequence has elsewhere is one that the model knows
    rows = np.flatnonzero(differs.any(axis=1)) if leaf.ndim == 2 else ()
    for row in rows:
        changed[row, at] = others[row, np.argmax(differs[row])]
    return changed


# ---- scales


def _on_scale(runner: Live, sample: Sample, before: dict[Side, list[Array]]) -> str:
    """Recognise scores without their scale: the sides agree once the queries of one side are multiplied by it."""
    pair = runner.pair
    matches = [match for match in pair.pairing.matches if _is_query(match)]
    if not matches or are_close(before["first"], before["second"], AGREE):
        return ""
    sides: tuple[tuple[Side, Side], ...] = (("second", "first"), ("first", "second"))
    for width in _widths({size for match in matches for size in match.first.shape}):
        for side, other in sides:
            if are_close(_with_queries_times(runner, side, sample, matches, width**-0.5), before[other], AGREE):
                return f"the sides agree with the queries of {pair.shown[side]} times 1/sqrt({width})"
    return ""


def _is_query(match: Match) -> bool:
    return any(_QUERY.search(tensor.name.lower()) for tensor in (match.first, match.second))


def _widths(sizes: Collection[int]) -> list[int]:
    """Return the widths that heads of queries may have; of large ones those that models have."""
    widths = {width for size in sizes for width in range(2, size + 1) if size % width == 0}
    return sorted(width for width in widths if max(sizes) <= ALL_WIDTHS or width in range(*LIKELY_WIDTHS))


def _with_queries_times(runner: Live, side: Side, sample: Sample, matches: list[Match], scale: float) -> list[Array]:
    """Return the outputs of a side whose queries are scaled by their weights and biases."""
    pair = runner.pair
    weights = dict(pair.weights(sample, side))
    for source in {(match.first if side == "first" else match.second).source for match in matches}:
        weights[source] = weights[source].astype(np.float64)
    for match in matches:
        part = (match.first if side == "first" else match.second).take(weights, side)
        part *= scale
    return [wide(one) for one in runner.precisely(side, weights, sample.arguments[side]).outputs]
