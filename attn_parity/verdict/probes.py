"""Probes: run one side of a pair again with other roundings, and record how far its results move.

- ``jitter``: every operation rounds at random, by up to one unit in the last place of its result.
- ``logsumexp``: softmax is computed as exp(score - logsumexp(score)), as fused attention kernels recompute it in their
  backward pass (FlashAttention). It bounds the loss in gradients, not in outputs.
- ``flash``: the same in float64, for fused attention alone: the distance between its formula and softmax itself. No
  kernel runs, so that a kernel's own errors are not included.
- ``tables``: in float64, constants and values computed from them alone (rotary tables, positions) are moved by up to
  one unit of float32.
- ``literals``: in float64, literals of float32 accuracy are moved by a unit of their last digit, and branches that
  float32 cannot distinguish are exchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..pair import SIDES, Pair
from ..results.findings import Side
from ..samples.sampling import Planned, Sample
from ..sides.arrays import is_float, release
from ..sides.subject import Array, Run
from ..sides.tables import STILL
from .criterion import allowed_meaning, beyond, precision_used
from .measures import (
    CHUNK,
    FLASH_LIMIT,
    LITERAL_LIMIT,
    TABLE_LIMIT,
    Explained,
    Measure,
    MeasureKey,
    chunk,
    with_error,
    with_flash_loss,
    with_literal_error,
    with_table_error,
)

if TYPE_CHECKING:
    from .runner import Live, Runner

Kind = Literal["jitter", "logsumexp", "flash", "tables", "literals"]

KINDS: tuple[Kind, ...] = ("jitter", "logsumexp", "flash", "tables", "literals")

EXACT: tuple[Kind, ...] = ("tables", "literals")
"""Probes that run in float64."""

HOPELESS = 30.0
"""Share of precision on one sample, other roundings counted, beyond which no further sample is asked."""

FLASH_SEEDS = 2
"""How many times the roundings of fused attention are drawn in float64."""


TABLE_SEEDS = 2
"""How many times tables are moved, and literals."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far one tensor moved: root mean square, and largest."""

    rms: float
    largest: float

    def joined(self, other: Moved) -> Moved:
        """Return the larger of both."""
        return Moved(max(self.rms, other.rms), max(self.largest, other.largest))


Probe = Mapping[str, Moved]
"""Name of a tensor -> how far it moved; empty where there was nothing to move."""


def probed(runner: Live, kind: Kind, side: Side, sample: Sample, dtype: str, seed: int) -> dict[str, Moved]:
    """Run one side of a live pair with other roundings.

    Args:
        runner: runs the pair.
        kind: which roundings.
        side: the side.
        sample: the sample.
        dtype: the precision that is judged.
        seed: of the random roundings; those of ``flash`` are always the same.
    """
    if kind == "flash":
        return _lost_by_flash(runner, side, sample, dtype)
    pair = runner.pair
    run = runner.exact if kind in EXACT else runner.run
    moved = run(side, sample, dtype, kind, seed)
    if kind != "jitter" and not moved.moved:
        return {}
    plain = pair.named(side, runner.plain(side, sample, dtype, exact=kind in EXACT))
    other = pair.named(side, moved)
    return {
        name: moved_by(array, other[name][1])
        for name, (what, array) in plain.items()
        if is_float(array) and not (kind == "logsumexp" and what == "output")
    }


def _lost_by_flash(runner: Live, side: Side, sample: Sample, dtype: str) -> dict[str, Moved]:
    """Return how far the gradients of one side move in float64 when fused attention rounds as its formula does."""
    still = runner.exact(side, sample, dtype, "flash", STILL)
    if not still.moved:
        return {}
    plain = runner.pair.named(side, still)
    moves: dict[str, Moved] = {}
    for seed in range(FLASH_SEEDS):
        other = runner.pair.named(side, runner.exact(side, sample, dtype, "flash", seed))
        for name, (what, array) in plain.items():
            if what != "output" and is_float(array):
                moved = moved_by(array, other[name][1])
                moves[name] = moved.joined(moves.get(name, moved))
    return moves


def moved_by(plain: Array, other: Array) -> Moved:
    """Return how far a result is from the plain one, where both are finite."""
    flat_plain, flat_other = plain.reshape(-1), other.reshape(-1)
    square = largest = 0.0
    for start in range(0, flat_plain.size, CHUNK):
        with np.errstate(invalid="ignore"):
            error = np.abs(chunk(flat_other, start) - chunk(flat_plain, start))
        if not math.isfinite(top := float(error.max())):
            finite = np.isfinite(chunk(flat_plain, start)) & np.isfinite(chunk(flat_other, start))
            error = np.where(finite, error, 0.0)
            top = float(error.max())
        square += float(error @ error)
        largest = max(largest, top)
    release(plain, other)
    return Moved(math.sqrt(square / max(flat_plain.size, 1)), largest)


class Probing:
    """Runs the sides of a pair with other roundings, and remembers which of them change nothing.

    Args:
        runner: what runs the pair.
        dtype: the precision that is judged.
        modes: how the pair is run.
    """

    def __init__(self, runner: Runner, dtype: str, modes: Sequence[str]):
        self.runner, self.dtype, self.modes = runner, dtype, modes
        self.pair: Pair = runner.pair
        self._has: dict[tuple[Kind, Side], bool] = {}
        self._are_same: dict[Kind, bool] = {}

    # ---- what differs in meaning

    def explain(
        self, sample: Sample, exact: Mapping[Side, Run], last: Mapping[MeasureKey, Measure], kinds: Mapping[str, str]
    ) -> tuple[dict[MeasureKey, Measure], Explained]:
        """Measure how much of the differences in meaning tables, literals and fused attention explain.

        Args:
            sample: the sample that shows them.
            exact: the float64 run of each side.
            last: tensor and mode -> the measure on the sample.
            kinds: tensor -> its kind.

        Returns:
            The measures with their allowances, and the largest allowance of each cause.
        """
        measures, explained = dict(last), Explained()
        # In this order: each step asks `beyond` again, which leaves out what an earlier step has explained.
        self._allow_tables(sample, measures, explained)
        self._allow_literals(sample, measures, explained)
        self._allow_flash(sample, exact, measures, kinds, explained)
        return measures, explained

    def _allow_tables(self, sample: Sample, measures: dict[MeasureKey, Measure], explained: Explained) -> None:
        """Measure what tables in float32 explain of a difference in meaning that only they might explain."""
        doubted = beyond(measures, self.dtype)
        if not doubted or _largest_meaning(measures, doubted) > TABLE_LIMIT:
            return
        moved = self._moves("tables", sample)
        for name in {name for name, _ in doubted} & moved.keys():
            for mode in self.modes:
                allowed = measures[name, mode] = with_table_error(measures[name, mode], moved[name])
                explained.tables = max(explained.tables, min(allowed.allowance, allowed.meaning or 0.0))

    def _allow_literals(self, sample: Sample, measures: dict[MeasureKey, Measure], explained: Explained) -> None:
        """Allow the effect of literals of float32 accuracy and of branches that float32 cannot distinguish."""
        doubted = beyond(measures, self.dtype)
        is_seen = self.dtype == "float64" or _largest_meaning(measures, doubted) > LITERAL_LIMIT
        if not doubted or is_seen or self.pair.effort.large:
            return
        moves = self._moves("literals", sample)
        for key in [key for key in doubted if key[0] in moves]:
            allowed = with_literal_error(measures[key], moves[key[0]])
            if (allowed.meaning or 0.0) <= allowed_meaning(allowed, self.dtype):
                measures[key] = allowed
                explained.join(Explained(literals=allowed.meaning or 0.0, unseen=sample))

    def _allow_flash(
        self,
        sample: Sample,
        exact: Mapping[Side, Run],
        measures: dict[MeasureKey, Measure],
        kinds: Mapping[str, str],
        explained: Explained,
    ) -> None:
        """Allow gradients the effect of the formula of fused attention; outputs get no allowance.

        With plain softmax instead of fused attention the gradients must agree like any others, so that only the
        kernel's formula is excused.
        """
        doubted = beyond(measures, self.dtype)
        if not doubted or max(doubted.values()) > FLASH_LIMIT or any(kinds[name] == "output" for name, _ in doubted):
            return
        unfused = self.unfused(sample)
        if not unfused:
            return
        plain = {side: self.pair.named(side, unfused.get(side, exact[side])) for side in SIDES}
        lost = self.flash_losses(sample, unfused)
        for key in [key for key in doubted if key[0] in lost]:
            apart = moved_by(*(plain[side][key[0]][1] for side in SIDES)).largest
            if apart <= allowed_meaning(measures[key], self.dtype) * measures[key].meaning_scale:
                allowed = measures[key] = with_flash_loss(measures[key], lost[key[0]])
                explained.flash = max(explained.flash, allowed.meaning or 0.0)

    def _moves(self, kind: Kind, sample: Sample) -> dict[str, float]:
        """Return how far the float64 results of both sides move in total when their tables, or literals, are moved.

        Empty if both sides have the same ones, which cannot explain a difference.
        """
        moves: dict[str, float] = {}
        if kind not in self._are_same:
            self._are_same[kind] = self._have_same(kind, sample)
        for side in SIDES if not self._are_same[kind] else ():
            largest: dict[str, float] = {}
            for seed in range(TABLE_SEEDS):
                probe = {} if side in self.pair.lacks else self._probe(kind, side, sample, seed)
                for name, distance in probe.items():
                    largest[name] = max(largest.get(name, 0.0), distance.largest)
            for name, size in largest.items():
                moves[name] = moves.get(name, 0.0) + size
        return moves

    def _have_same(self, kind: Kind, sample: Sample) -> bool:
        if kind == "literals":
            return self.runner.same_literals(sample, self.dtype)
        first, second = (self.runner.tables(side, sample, self.dtype) for side in SIDES)
        return first is not None and second is not None and first.equals(second)

    def _probe(self, kind: Kind, side: Side, sample: Sample, seed: int) -> Probe:
        """Run a side with other roundings, unless an earlier run had nothing to move."""
        if not self._has.get((kind, side), True):
            return {}
        probe = self.runner.probe(kind, side, sample, self.dtype, seed)
        self._has[kind, side] = bool(probe)
        return probe

    def unfused(self, sample: Sample) -> dict[Side, Run]:
        """Return the float64 results of the sides that run fused attention, with plain softmax instead."""
        runs: dict[Side, Run] = {}
        for side in SIDES:
            if side not in self.pair.lacks and self._has.get(("flash", side), True):
                run = self.runner.exact(side, sample, self.dtype, "flash", STILL)
                self._has["flash", side] = run.moved > 0
                if run.moved:
                    runs[side] = run
        return runs

    def flash_losses(self, sample: Sample, sides: Iterable[Side]) -> dict[str, float]:
        """Return the loss of float64 gradients to the formula of fused attention, summed over some sides."""
        losses: dict[str, float] = {}
        for side in sides:
            for name, moved in self.runner.probe("flash", side, sample, self.dtype, 0).items():
                losses[name] = losses.get(name, 0.0) + moved.largest
        return losses

    # ---- what is less precise

    def raised(
        self,
        side: Side,
        plan: Sequence[Planned],
        measures: Mapping[MeasureKey, Sequence[Measure]],
        floors: Mapping[str, float],
    ) -> dict[MeasureKey, list[Measure]]:
        """Return measures with the errors of one side raised to its loss under other roundings, per sample.

        Args:
            side: the side.
            plan: the samples that were taken.
            measures: tensor and mode -> a measure per sample.
            floors: tensor -> units of the last place that the sides differ from themselves.
        """
        raised_measures: dict[MeasureKey, list[Measure]] = {}
        for position, planned in enumerate(plan):
            self.pair.progress(f"redrawing the roundings of {self.pair.shown[side]}", position, len(plan))
            sample = self.runner.sample(planned)
            assert sample is not None, "it was taken"
            probes = list(self.roundings(side, sample, position))
            for (name, mode), plain in measures.items():
                raised = plain[position]
                for moved in [probe[name] for probe in probes if name in probe]:
                    raised = with_error(raised, side, moved.rms, moved.largest, self.dtype)
                raised_measures.setdefault((name, mode), []).append(raised)
            if not position and _is_hopeless(side, raised_measures, floors):
                break
        return raised_measures

    def roundings(self, side: Side, sample: Sample, seed: int) -> Iterable[Probe]:
        """Yield the effects of other roundings.

        First every operation of the side that is the measure rounds at random; then softmax of either side is computed
        from its log-sum-exp, as the backward pass of fused kernels recomputes it, and tables in float32 are moved.
        """
        yield self.runner.probe("jitter", side, sample, self.dtype, seed)
        for probed_side in SIDES:
            yield self._probe("logsumexp", probed_side, sample, seed)
            yield {} if probed_side in self.pair.lacks else self._probe("tables", probed_side, sample, seed)


def _largest_meaning(measures: Mapping[MeasureKey, Measure], keys: Iterable[MeasureKey]) -> float:
    return max((measures[key].meaning or 0.0 for key in keys), default=0.0)


def _is_hopeless(side: Side, measures_of: Mapping[MeasureKey, Sequence[Measure]], floors: Mapping[str, float]) -> bool:
    """Return whether the first sample rules out that other roundings of one side explain the loss of the other."""
    accused = 1 if side == "first" else 0
    shares = [precision_used(measures, floors.get(key[0], 0.0))[accused] for key, measures in measures_of.items()]
    return min(shares, default=0.0) > HOPELESS
