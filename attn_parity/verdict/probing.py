"""The probes of a pair in one precision: each is asked for only where the side has something to move."""

from __future__ import annotations

from collections.abc import Iterable

from ..pair import SIDES, Pair
from ..results.findings import Side
from ..samples.sampling import Sample
from ..sides.subject import Run
from ..sides.tables import STILL
from .probes import Probe
from .runner import Runner

TABLE_SEEDS = 2
"""How many times tables are moved, and literals."""


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
