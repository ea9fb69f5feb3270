"""The tensors of a pair whose numbers are not drawn: frozen parameters, and those that rules drop.

Comes in: a pairing. Goes out: names, and notes for the report. Nothing here runs a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..sides.subject import Parameter
from . import Pairing
from .pair import SIDES, Pair

MAX_SHOWN = 6
"""Most names in a note."""


def kept(pairing: Pairing, first: Mapping[str, Parameter]) -> frozenset[str]:
    """Return the first side's weights whose numbers every sample keeps."""
    dropped = {name for side, name, _ in pairing.dropped if side == "first"}
    frozen = {name for name, one in first.items() if one.frozen}
    frozen |= {match.first.source for match in pairing.matches if match.second.parameter.frozen}
    return frozenset(dropped | frozen)


def frozen_notes(pair: Pair) -> Iterator[str]:
    """Name the frozen parameters of each side."""
    for side in SIDES:
        frozen = [name for name, one in pair.subject(side).parameters().items() if one.frozen]
        if frozen:
            yield f"frozen in {pair.shown[side]}, so every sample keeps the given numbers: {listed(frozen)}"


def listed(names: Sequence[str]) -> str:
    """Return names in a row, the first ones of many."""
    more = len(names) - MAX_SHOWN
    return ", ".join(names[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
