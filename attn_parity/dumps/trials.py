"""Score candidate pairings against recorded results, which are looked up instead of run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..matching.outputs import Trials
from ..pair import Pair
from ..pairing import Pairing
from ..results.findings import Side
from .format import Dump


class RecordedTrials(Trials):
    """Tries pairings out; a dump knows the order of use and the weights without effect of its side.

    Args:
        pair: the pair.
        dumps: the sides that were recorded.
        distance: returns how far apart the outputs are by a pairing.
    """

    def __init__(self, pair: Pair, dumps: Mapping[Side, Dump], distance: Callable[[Pairing], float]):
        super().__init__(pair)
        self._dumps, self._distance = dumps, distance

    def distance(self, candidate: Pairing) -> float:
        """Return how far apart the outputs are by a pairing."""
        return self._distance(candidate)

    def held_distance(self, candidate: Pairing) -> float:
        """Return how far apart the outputs are by a pairing: dumps hold them for one set of weights."""
        return self._distance(candidate)

    def without_effect(self, side: Side, names: Collection[str]) -> list[str]:
        """Return those of some weights that can be NaN without a change of the outputs."""
        if side not in self._dumps:
            return super().without_effect(side, names)
        reach = self._dumps[side].manifest.reach
        return [name for name in names if not reach.get(name, (True, True))[0]]
