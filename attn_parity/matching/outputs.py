"""The outputs of two sides: whether they have one structure, how far apart they are, and trial runs of pairings.

Trials come in as a pair, candidates and names, and go out as distances and names. A run that fails decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..pair import Pair
from ..pairing import MAX_CANDIDATES, Pairing
from ..results.findings import Side
from ..samples.sampling import OutputStructure, draw_weights
from ..sides.arrays import is_float
from ..sides.entries import WORD, shown
from ..sides.subject import Arrays, ModuleFailedError, Run
from ..verdict.measures import scale_of
from ..verdict.runner import Live
from . import state

# About 840 units of float32 (1.2e-7).
PROBE_LIMIT = 1e-4
"""Largest relative distance of outputs that agree, if one side has no float64."""

PAIRING_WORK = 3e11
"""Operations that trying out pairings may take: about 30 s of float64 on two cores, forward passes alone."""

LEAST_CANDIDATES = 8
"""Pairings that are tried out however large the sides are."""

MAX_IDLE = 64
"""Most parameters that are poisoned one by one to find those without effect."""


def check_outputs(
    first: OutputStructure, second: OutputStructure, labels: Mapping[Side, str], entry: str | None = None
) -> None:
    """Check that two sides return the same structure of the same shapes.

    A lone array equals a container of a single array, such as the logits that `transformers` returns.

    Args:
        first: outputs of the first side.
        second: outputs of the second side.
        labels: names of the sides.
        entry: the entry of both that was picked already.

    Raises:
        ModuleFailedError: structure, names or shapes differ, or an output is complex.
    """
    places, other_places = [_keyed(one[0]) for one in first], [_keyed(one[0]) for one in second]
    named = any("['" in place or '["' in place for place, _, _ in (*first, *second))
    alone = len(places) == len(other_places) == 1 and "" in (*places, *other_places)
    reordered = places != other_places and sorted(places) == sorted(other_places)
    ours, theirs = labels["first"], labels["second"]
    if len(places) != len(other_places) or (named and not alone and places != other_places) or reordered:
        raise ModuleFailedError(
            f"the outputs differ in structure: {ours} returns {_listed(first)}, {theirs} returns {_listed(second)}; "
            f"compare modules (or wrappers of them) that return the same{_entries(first, second, entry)}"
        )
    for label, outputs in ((ours, first), (theirs, second)):
        for path, _, dtype in outputs:
            if dtype.startswith("complex"):
                raise ModuleFailedError(
                    f"output{path} of {label} is {dtype}; complex numbers are not judged, return their real and "
                    "imaginary parts"
                )
    for (path, shape, _), (_, other, _) in zip(first, second, strict=True):
        if shape != other:
            moved = "; if its axes lie in another order, wrap one side so that it returns them in the other's"
            raise ModuleFailedError(
                f"the outputs differ in shape: output{path} is {shape} in {ours} and {other} in {theirs}"
                f"{moved if sorted(shape) == sorted(other) else ''}"
            )
    if all(0 in shape for _, shape, _ in first):
        raise ModuleFailedError(f"there is nothing to compare: the outputs are empty ({_listed(first)})")


def _entries(first: OutputStructure, second: OutputStructure, entry: str | None) -> str:
    """Return how to pick an entry, where a side returns a structure and none was picked."""
    names = [shown([(place, None) for place, _, _ in side]) for side in (first, second)]
    every = ", ".join(dict.fromkeys(filter(None, ", ".join(filter(None, names)).split(", "))))
    return (
        f", or pick an entry of what they return: output=NAME (--output NAME) of {every}" if every and not entry else ""
    )


def plain_outputs(first: Mapping[str, object], second: Mapping[str, object], labels: tuple[str, str]) -> list[str]:
    """Return a message for each plain output (a number, bool or text, not an array) that differs between the sides."""
    messages = []
    ours, theirs = ({_keyed(place): value for place, value in one.items()} for one in (first, second))
    for path in dict.fromkeys([*ours, *theirs]):
        mine, other = (repr(side[path]) if path in side else "nothing" for side in (ours, theirs))
        if mine != other:
            messages.append(
                f"output{path} is no array and not compared: it is {mine} in {labels[0]} and {other} in {labels[1]}"
            )
    return messages


def _keyed(path: str) -> str:
    """Return a place with attributes written as keys: a dataclass and a mapping of the same names hold the same."""
    return "".join(f"[{word[1:]!r}]" if word.startswith(".") else word for word in WORD.findall(path))


def apart(left: Run, right: Run) -> float:
    """Return how far apart the outputs of two runs are, relative to the largest of them."""
    pairs = list(zip(left.outputs, right.outputs, strict=True))
    if any(first.shape != second.shape for first, second in pairs):
        return float("inf")
    scale = scale_of([first for first, _ in pairs]) or 1.0
    largest = max((float(np.abs(a - b).max(initial=0.0)) for a, b in pairs if is_float(a)), default=0.0)
    return largest / scale if np.isfinite(largest) else float("inf")


def _listed(outputs: list[tuple[str, tuple[int, ...], str]]) -> str:
    places = [f"{place or 'an array'} {shape}" for place, shape, _ in outputs]
    return f"{len(outputs)} ({', '.join(places)})"


class Trials:
    """Tries pairings of a pair; the first side runs once per set of weights."""

    def __init__(self, pair: Pair):
        self._pair, self._runner = pair, Live(pair)
        self._runs: dict[Any, tuple[Arrays, Run]] = {}

    @property
    def limit(self) -> int:
        """How many pairings are tried at most, which follows from the work of a run and not from a clock."""
        affordable = int(PAIRING_WORK / max(self._pair.effort.work, 1.0))
        return max(LEAST_CANDIDATES, min(MAX_CANDIDATES, affordable))

    def distance(self, candidate: Pairing) -> float:
        """Return how far apart the outputs are when both sides hold the same drawn weights by a pairing."""
        pair = self._pair
        parameters = candidate.drawn_as(pair.first.parameters())
        kept = state.kept(candidate, parameters)
        key = kept, frozenset((name, one.role) for name, one in parameters.items())
        if key not in self._runs:
            drawn = draw_weights(parameters, pair.own_weights["first"], (0, 1), kept)
            self._runs[key] = drawn, self._runner.precisely("first", drawn, pair.arguments["first"])
        return self._apart(candidate, *self._runs[key])

    def largest_distance(self, candidate: Pairing) -> float:
        """Return how far apart the outputs are with the first side's weights or with drawn ones, whichever is more.

        Drawn weights may saturate the outputs, which then agree whatever the rest is.
        """
        return max(self.distance(candidate), self.held_distance(candidate))

    def held_distance(self, candidate: Pairing) -> float:
        """Return how far apart the outputs are when both sides hold the first side's own weights by a pairing."""
        return self._apart(candidate, self._pair.own_weights["first"], None)

    def _apart(self, candidate: Pairing, drawn: Arrays, wanted: Run | None) -> float:
        pair = self._pair
        wanted = wanted or self._runner.precisely("first", drawn, pair.arguments["first"])
        weights = {**pair.own_weights["second"], **candidate.to_second(drawn)}
        distance = apart(wanted, self._runner.precisely("second", weights, pair.arguments["second"]))
        # Without float64 the right pairing differs by rounding, which is far above `AGREE`.
        return 0.0 if pair.lacks and distance < PROBE_LIMIT else distance

    def orders(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the order in which each side uses its weights."""
        return self.uses("first"), self.uses("second")

    def uses(self, side: Side) -> dict[str, int]:
        """Return weight of a side -> position of its first use; empty if unavailable."""
        pair = self._pair
        with contextlib.suppress(Exception):  # it decides nothing that could not be decided without it
            uses: dict[str, int] = pair.subject(side).uses(pair.own_weights[side], pair.arguments[side])
            return uses
        return {}

    def without_effect(self, side: Side, names: Collection[str]) -> list[str]:
        """Return those of some weights that can be NaN without a change of the outputs.

        The side holds its own weights, or drawn ones where these leave fewer of the outputs NaN: zeros of a tree that
        only has its shapes may be divided by.
        """
        weights = self._pair.own_weights[side]
        some = [name for name in names if name in weights and is_float(weights[name])]
        before = self._outputs(side, weights) if some else None
        if before is not None and _nans(before):
            drawn = draw_weights(self._pair.subject(side).parameters(), weights, (0, 1))
            again = self._outputs(side, drawn)
            if again is not None and _nans(again) < _nans(before):
                weights, before = drawn, again
        if before is None or _nans(before) == 1.0:
            return []
        if self._is_idle(side, weights, some, before):
            return some
        return [name for name in some[:MAX_IDLE] if len(some) > 1 and self._is_idle(side, weights, [name], before)]

    def _is_idle(self, side: Side, weights: Arrays, names: Sequence[str], before: Run) -> bool:
        run = self._outputs(side, {**weights, **{name: np.full_like(weights[name], np.nan) for name in names}})
        if run is None:
            return False
        pairs = zip(before.outputs, run.outputs, strict=True)
        return all(np.array_equal(one, two, equal_nan=is_float(one)) for one, two in pairs)

    def _outputs(self, side: Side, weights: Arrays) -> Run | None:
        """Run a side with some weights; None where it refuses such numbers."""
        pair = self._pair
        with contextlib.suppress(Exception):  # what raises on NaN uses the number
            run: Run = pair.subject(side).run(weights, pair.arguments[side])
            return run
        return None


def _nans(run: Run) -> float:
    """Return the largest share of an output's numbers that are NaN."""
    outputs = (array for array in run.outputs if is_float(array) and array.size)
    return max((float(np.isnan(array).mean()) for array in outputs), default=0.0)
