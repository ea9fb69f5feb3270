"""Runs both sides to try a pairing out, and one side to find weights that no output depends on.

Comes in: a pair, candidates, names. Goes out: distances and names. A run that fails decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..pair import Pair
from ..pairing import MAX_CANDIDATES, Pairing
from ..results.findings import Side
from ..samples.sampling import draw_weights
from ..sides.dtypes import is_float
from ..sides.subject import Arrays, Run
from ..verdict.runner import Live
from . import state
from .outputs import apart

PROBE_LIMIT = 1e-4
"""How far apart outputs may be that are said to agree, where one side has no float64."""

PAIRING_WORK = 3e11
"""Operations that trying out pairings may take: about 30 s of float64 on two cores, forward passes alone."""

LEAST_CANDIDATES = 8
"""Pairings that are tried out however large the sides are."""

MAX_IDLE = 64
"""Most parameters that are poisoned one by one to find those without effect."""


class Trials:
    """Tries pairings of a pair out; what the first side returns is run once for each set of weights."""

    def __init__(self, pair: Pair):
        self._pair, self._runner = pair, Live(pair)
        self._runs: dict[Any, tuple[Arrays, Run]] = {}

    @property
    def limit(self) -> int:
        """How many pairings are tried at most, which follows from the work of a run and not from a clock."""
        affordable = int(PAIRING_WORK / max(self._pair.effort.work, 1.0))
        return max(LEAST_CANDIDATES, min(MAX_CANDIDATES, affordable))

    def distance(self, candidate: Pairing) -> float:
        """Return how far apart the outputs are when both sides hold the same weights by a pairing."""
        pair = self._pair
        parameters = candidate.drawn_as(pair.first.parameters())
        kept = state.kept(candidate, parameters)
        key = kept, frozenset((name, one.role) for name, one in parameters.items())
        if key not in self._runs:
            drawn = draw_weights(parameters, pair.held["first"], (0, 1), kept)
            self._runs[key] = drawn, self._runner.precisely("first", drawn, pair.arguments["first"])
        drawn, wanted = self._runs[key]
        weights = {**pair.held["second"], **candidate.to_second(drawn)}
        distance = apart(wanted, self._runner.precisely("second", weights, pair.arguments["second"]))
        return 0.0 if pair.lacks and distance < PROBE_LIMIT else distance

    def orders(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the order in which each side uses its weights."""
        return self.uses("first"), self.uses("second")

    def uses(self, side: Side) -> dict[str, int]:
        """Return name of a weight of a side -> when it is used first; nothing if that can't be told."""
        pair = self._pair
        with contextlib.suppress(Exception):  # it decides nothing that could not be decided without it
            found: dict[str, int] = pair.subject(side).uses(pair.held[side], pair.arguments[side])
            return found
        return {}

    def without_effect(self, side: Side, names: Collection[str]) -> list[str]:
        """Return those of some weights that can be NaN without a change of the outputs."""
        held = self._pair.held[side]
        some = [name for name in names if name in held and is_float(held[name])]
        before = self._outputs(side, []) if some else None
        if before is None:
            return []
        if self._is_idle(side, some, before):
            return some
        return [name for name in some[:MAX_IDLE] if len(some) > 1 and self._is_idle(side, [name], before)]

    def _is_idle(self, side: Side, names: Sequence[str], before: Run) -> bool:
        run = self._outputs(side, names)
        if run is None:
            return False
        pairs = zip(before.outputs, run.outputs, strict=True)
        return all(np.array_equal(one, two, equal_nan=is_float(one)) for one, two in pairs)

    def _outputs(self, side: Side, poisoned: Sequence[str]) -> Run | None:
        """Run a side with its own weights, some of them NaN; None where it refuses such numbers."""
        pair, held = self._pair, self._pair.held[side]
        weights = {**held, **{name: np.full_like(held[name], np.nan) for name in poisoned}}
        with contextlib.suppress(Exception):  # what raises on NaN uses the number
            found: Run = pair.subject(side).run(weights, pair.arguments[side])
            return found
        return None
