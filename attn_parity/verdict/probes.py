"""What other roundings would cost one side of a pair: a side is run once more, and how far its results move is kept.

- ``jitter``: every operation rounds at random, by up to one unit in the last place of its result.
- ``logsumexp``: softmax is computed as exp(score - logsumexp(score)), as fused attention kernels recompute it in their
  backward pass (FlashAttention). It says what gradients may lose, and nothing about outputs.
- ``flash``: the same in float64, of fused attention alone: how far apart its formula and softmax itself are. No kernel
  runs, so that what a kernel does wrong is no part of it.
- ``tables``: in float64, constants and all that is computed from them alone (rotary tables, positions) are moved by up
  to one unit of float32.
- ``literals``: in float64, literals of float32 accuracy are moved by a unit of their last digit, and branches that
  float32 can't tell apart are exchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..pair import SIDES, Pair
from ..results.findings import Side
from ..samples.sampling import Sample
from ..sides.dtypes import is_float
from ..sides.large import release
from ..sides.subject import Array, Run
from ..sides.tables import STILL
from .measures import CHUNK, chunk

if TYPE_CHECKING:
    from .runner import Live, Runner

Kind = Literal["jitter", "logsumexp", "flash", "tables", "literals"]

KINDS: tuple[Kind, ...] = ("jitter", "logsumexp", "flash", "tables", "literals")

EXACT: tuple[Kind, ...] = ("tables", "literals")
"""Probes that run in float64."""

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
        runner: what runs the pair.
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
    found: dict[str, Moved] = {}
    for seed in range(FLASH_SEEDS):
        other = runner.pair.named(side, runner.exact(side, sample, dtype, "flash", seed))
        for name, (what, array) in plain.items():
            if what != "output" and is_float(array):
                moved = moved_by(array, other[name][1])
                found[name] = moved.joined(found.get(name, moved))
    return found


def moved_by(plain: Array, other: Array) -> Moved:
    """Return how far a result is from the plain one, where both are finite."""
    one, two = plain.reshape(-1), other.reshape(-1)
    square = largest = 0.0
    for start in range(0, one.size, CHUNK):
        with np.errstate(invalid="ignore"):
            error = np.abs(chunk(two, start) - chunk(one, start))
        if not math.isfinite(top := float(error.max())):
            both = np.isfinite(chunk(one, start)) & np.isfinite(chunk(two, start))
            error = np.where(both, error, 0.0)
            top = float(error.max())
        square += float(error @ error)
        largest = max(largest, top)
    release(plain, other)
    return Moved(math.sqrt(square / max(one.size, 1)), largest)


class Probing:
    """Runs the sides of a pair with other roundings, and remembers which of them change nothing."""

    def __init__(self, runner: Runner, dtype: str):
        self.runner, self.dtype = runner, dtype
        self.pair: Pair = runner.pair
        self._has_tables: dict[Side, bool] = {}
        self._has_same_tables: bool | None = None
        self._has_literals: dict[Side, bool] = {}
        self._has_same_literals: bool | None = None
        self._has_softmax: dict[Side, bool] = {}
        self._has_flash: dict[Side, bool] = {}

    def table_moves(self, sample: Sample) -> dict[str, float]:
        """Return how far the float64 results of both sides together move with tables that move by one unit.

        Tables that are the same on both sides explain nothing.
        """
        found: dict[str, float] = {}
        if self._has_same_tables is None:
            first, second = (self.runner.tables(side, sample, self.dtype) for side in SIDES)
            self._has_same_tables = first is not None and second is not None and first.equals(second)
        if self._has_same_tables:
            return found
        for side in SIDES:
            largest: dict[str, float] = {}
            for seed in range(TABLE_SEEDS):
                for name, moved in self._tables(side, sample, seed).items():
                    largest[name] = max(largest.get(name, 0.0), moved.largest)
            for name, size in largest.items():
                found[name] = found.get(name, 0.0) + size
        return found

    def _tables(self, side: Side, sample: Sample, seed: int) -> Probe:
        if side in self.pair.lacks or not self._has_tables.get(side, True):
            return {}
        found = self.runner.probe("tables", side, sample, self.dtype, seed)
        self._has_tables[side] = bool(found)
        return found

    def literal_moves(self, sample: Sample) -> dict[str, float]:
        """Return how far the float64 results of both sides together move by what float32 can't show.

        Literals that are the same on both sides explain nothing.
        """
        moves: dict[str, float] = {}
        if self._has_same_literals is None:
            self._has_same_literals = self.runner.same_literals(sample, self.dtype)
        for side in SIDES if not self._has_same_literals else ():
            largest: dict[str, float] = {}
            for seed in range(TABLE_SEEDS):
                if side in self.pair.lacks or not self._has_literals.get(side, True):
                    continue
                probe = self.runner.probe("literals", side, sample, self.dtype, seed)
                self._has_literals[side] = bool(probe)
                for name, distance in probe.items():
                    largest[name] = max(largest.get(name, 0.0), distance.largest)
            for name, size in largest.items():
                moves[name] = moves.get(name, 0.0) + size
        return moves

    def unfused(self, sample: Sample) -> dict[Side, Run]:
        """Return the float64 results of the sides that run fused attention, by softmax itself in place of it."""
        found: dict[Side, Run] = {}
        for side in SIDES:
            if side not in self.pair.lacks and self._has_flash.get(side, True):
                run = self.runner.exact(side, sample, self.dtype, "flash", STILL)
                self._has_flash[side] = run.moved > 0
                if run.moved:
                    found[side] = run
        return found

    def flash_losses(self, sample: Sample, sides: Iterable[Side]) -> dict[str, float]:
        """Return what the formula of fused attention costs the float64 gradients of some sides together."""
        found: dict[str, float] = {}
        for side in sides:
            for name, moved in self.runner.probe("flash", side, sample, self.dtype, 0).items():
                found[name] = found.get(name, 0.0) + moved.largest
        return found

    def roundings(self, side: Side, sample: Sample, seed: int) -> Iterable[Probe]:
        """Yield what other roundings cost.

        First every operation of the side that is the measure rounds at random; then softmax of either side is computed
        from its log-sum-exp, as the backward pass of fused kernels recomputes it, and tables in float32 are moved.
        """
        yield self.runner.probe("jitter", side, sample, self.dtype, seed)
        for one in SIDES:
            if self._has_softmax.get(one, True):
                found = self.runner.probe("logsumexp", one, sample, self.dtype, seed)
                self._has_softmax[one] = bool(found)
                yield found
            yield self._tables(one, sample, seed)
