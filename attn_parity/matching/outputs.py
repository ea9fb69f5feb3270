"""The outputs of two modules: whether they have one structure, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..results.findings import Side
from ..samples.sampling import Outputs
from ..sides.dtypes import is_float
from ..sides.entries import WORD, shown
from ..sides.subject import ModuleFailedError, Run
from ..verdict.measures import scale_of


def check_outputs(first: Outputs, second: Outputs, labels: Mapping[Side, str], entry: str | None = None) -> None:
    """Check that two sides return the same structure of the same shapes.

    An array alone is what a container of nothing but one array holds, as the logits that `transformers` returns.

    Args:
        first: outputs of the first side.
        second: outputs of the second side.
        labels: what to call the sides.
        entry: the entry of both that was picked already.

    Raises:
        ModuleFailedError: they don't.
    """
    places, other_places = [_keyed(one[0]) for one in first], [_keyed(one[0]) for one in second]
    named = any("['" in place or '["' in place for place, _, _ in (*first, *second))
    alone = len(places) == len(other_places) == 1 and "" in (*places, *other_places)
    reordered = places != other_places and sorted(places) == sorted(other_places)
    one, two = labels["first"], labels["second"]
    if len(places) != len(other_places) or (named and not alone and places != other_places) or reordered:
        raise ModuleFailedError(
            f"the outputs differ in structure: {one} returns {_listed(first)}, {two} returns {_listed(second)}; "
            f"compare modules (or wrappers of them) that return the same{_entries(first, second, entry)}"
        )
    for label, outputs in ((one, first), (two, second)):
        for place, _, dtype in outputs:
            if dtype.startswith("complex"):
                raise ModuleFailedError(
                    f"output{place} of {label} is {dtype}; complex numbers are not judged, return their real and "
                    "imaginary parts"
                )
    for (place, shape, _), (_, other, _) in zip(first, second, strict=True):
        if shape != other:
            moved = "; if its axes lie in another order, wrap one side so that it returns them in the other's"
            raise ModuleFailedError(
                f"the outputs differ in shape: output{place} is {shape} in {one} and {other} in {two}"
                f"{moved if sorted(shape) == sorted(other) else ''}"
            )
    if all(0 in shape for _, shape, _ in first):
        raise ModuleFailedError(f"there is nothing to compare: the outputs are empty ({_listed(first)})")


def _entries(first: Outputs, second: Outputs, entry: str | None) -> str:
    """Return how to pick an entry, where a side returns a structure and none was picked."""
    names = [shown([(place, None) for place, _, _ in side]) for side in (first, second)]
    every = ", ".join(dict.fromkeys(filter(None, ", ".join(filter(None, names)).split(", "))))
    return (
        f", or pick an entry of what they return: output=NAME (--output NAME) of {every}" if every and not entry else ""
    )


def plain_outputs(first: Mapping[str, Any], second: Mapping[str, Any], labels: tuple[str, str]) -> list[str]:
    """Say which outputs that are no arrays but Python's numbers, bools and texts are not the same on both sides."""
    found = []
    ours, theirs = ({_keyed(place): value for place, value in one.items()} for one in (first, second))
    for place in dict.fromkeys([*ours, *theirs]):
        one, two = (repr(side[place]) if place in side else "nothing" for side in (ours, theirs))
        if one != two:
            found.append(
                f"output{place} is no array and not compared: it is {one} in {labels[0]} and {two} in {labels[1]}"
            )
    return found


def _keyed(place: str) -> str:
    """Return a place with attributes written as keys: a dataclass and a mapping of the same names hold the same."""
    return "".join(f"[{word[1:]!r}]" if word.startswith(".") else word for word in WORD.findall(place))


def apart(one: Run, two: Run) -> float:
    """Return how far apart the outputs of two runs are, relative to the largest of them."""
    pairs = list(zip(one.outputs, two.outputs, strict=True))
    if any(first.shape != second.shape for first, second in pairs):
        return float("inf")
    scale = scale_of([first for first, _ in pairs]) or 1.0
    found = max((float(np.abs(a - b).max(initial=0.0)) for a, b in pairs if is_float(a)), default=0.0)
    return found / scale if np.isfinite(found) else float("inf")


def _listed(outputs: list[tuple[str, tuple[int, ...], str]]) -> str:
    places = [f"{place or 'an array'} {shape}" for place, shape, _ in outputs]
    return f"{len(outputs)} ({', '.join(places)})"
