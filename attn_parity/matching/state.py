"""The tensors of a pair whose numbers are not drawn, and the state that both sides hold beside parameters.

Comes in: a pairing, arrays. Goes out: names, decisions and notes for the report. Nothing here runs a side.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..pair import SIDES, Pair
from ..pairing import Pairing
from ..results.findings import Side
from ..sides.dtypes import is_float, unit_of, wide
from ..sides.subject import Array, Parameter
from .formulas import are_alike, is_computed, seems_computed

MAX_SHOWN = 6
"""Most names in a note."""

IDLE = "no effect on the outputs"
"""Why a parameter is set aside that no output depends on."""

FROZEN = "frozen"
"""How the reason begins for which a frozen parameter is set aside."""

DISTINCT = 0.9
"""Part of the numbers of an array that have a size of their own, below which it is taken for a table. Of 16,384 uniform
draws, which have 2**23 values, all but a thousandth have; of a square table of cosines less than a quarter."""

WRITTEN_DIGITS, MAX_LOOKED_AT = 5, 64
"""Significant digits up to which a number is taken for one that code has written, and how many numbers are looked at.
At most one in 200 random numbers of float32 has as few."""


def kept(pairing: Pairing, first: Mapping[str, Parameter]) -> frozenset[str]:
    """Return the first side's weights whose numbers every sample keeps: frozen, dropped, and state on both sides."""
    dropped = {name for side, name, _ in pairing.dropped if side == "first"}
    frozen = {name for name, one in first.items() if one.frozen}
    frozen |= {match.first.source for match in pairing.matches if match.second.parameter.frozen}
    both = {match.first.source for match in pairing.matches if _roles(match) == ("state", "state")}
    return frozenset(dropped | frozen | both)


def _roles(match: object) -> tuple[str, str]:
    return match.first.parameter.role, match.second.parameter.role  # type: ignore[attr-defined]


def waits_for_data(array: Array, first: Array | None = None) -> bool:
    """Tell whether the second side's numbers are first values that data of the first side replace, and not a table.

    Zeros, ones and numbers without order are first values. One other number everywhere, two numbers that repeat,
    numbers that follow a formula, or are smooth or ordered beyond chance, sizes that repeat, and numbers written with
    few digits are computed or written by code: there a difference is a fault, which carrying the first side's would
    hide.

    Args:
        array: the second side's numbers.
        first: the first side's; where the second side's may be ordered by chance, a table is one that is like these.
    """
    numbers = np.nan_to_num(wide(array).astype(np.float64))
    distinct = np.unique(numbers)
    if array.dtype == bool or distinct.size < min(3, numbers.size) or numbers.size == 1:
        return array.dtype != bool and distinct.size < 2 and bool(np.isin(distinct, (0.0, 1.0)).all())
    if array.dtype in (np.float32, np.float64) and (_repeats(numbers) or _is_written(array)):
        return False
    if is_computed(numbers, _unit(array)):
        return False
    return first is None or not seems_computed(numbers) or not are_alike(first, numbers)


def is_undecided(array: Array) -> bool:
    """Tell whether first values are ordered as a table may be, and are too few to tell that from chance."""
    return waits_for_data(array) and seems_computed(np.nan_to_num(wide(array).astype(np.float64)))


def are_two_constants(first: Array, second: Array) -> bool:
    """Tell whether the first side's numbers are written in code, and the second side's are no first values.

    Zeros and ones take whatever the first side has, as rounded data look like written numbers, and are carried.
    """
    if first.dtype not in (np.float32, np.float64) or np.unique(second).size < 2:
        return False
    return _is_written(first) and not waits_for_data(first)


def _repeats(numbers: Array) -> bool:
    """Tell whether the sizes of numbers repeat, zeros aside, as in a table of cosines."""
    sizes = np.abs(numbers[numbers != 0.0]).astype(np.float32)
    return bool(sizes.size and np.unique(sizes).size < DISTINCT * sizes.size)


def _is_written(array: Array) -> bool:
    """Tell whether all numbers are decimals of few digits, as code has them written."""
    values = array.ravel()[:MAX_LOOKED_AT]
    decimals = np.asarray([f"{value:.{WRITTEN_DIGITS - 1}e}" for value in values], np.float64)
    return bool((decimals.astype(array.dtype) == values).all())


def _unit(array: Array) -> float:
    """Return the unit of the last place that a table was rounded to; whole numbers are exact."""
    return unit_of(array.dtype.name) if is_float(array) else float(np.finfo(np.float64).eps)


def notes(pair: Pair, held: Mapping[Side, Mapping[str, Parameter]], pairing: Pairing) -> Iterator[str]:
    """Name the state that is carried between parameters and state, and the state that is not carried.

    Args:
        pair: the pair.
        held: the state of each side.
        pairing: its pairing.
    """
    for side in SIDES:
        label, at = pair.shown[side], SIDES.index(side)
        pairs = [
            match for match in pairing.matches if _roles(match)[at] == "state" and _roles(match)[1 - at] != "state"
        ]
        names = [match.tensor(side).name for match in pairs if "int" not in match.tensor(side).parameter.dtype]
        if names:
            yield f"state in {label} and weights on the other side, so that no gradient is compared: {listed(names)}"
    both = [match for match in pairing.matches if _roles(match) == ("state", "state")]
    if both and pair.transfer:
        names = [match.first.name for match in both]
        yield f"state that is carried from {pair.shown['first']} to {pair.shown['second']}: {listed(names)}"
        proposed = [match for match in both if match.how != "rule"]
        names = [one.second.name for one in proposed if is_undecided(one.second.take(pair.held["second"]))]
        if names:
            yield (
                f"carried, as too few numbers of {pair.shown['second']} show whether code computes them; a rule that "
                f"drops them keeps its own: {listed(names)}"
            )
    for side in SIDES:
        taken = {match.tensor(side).source for match in pairing.matches}
        taken |= {name for where, name, _ in pairing.dropped if where == side}
        left = [name for name in held[side] if name not in taken]
        if left:
            label = pair.shown[side]
            yield f"state that is not carried, so that {label} keeps its own: {listed(left)}"


def dropped_notes(pair: Pair) -> Iterator[str]:
    """Name what is left out of the pairing, by side and reason."""
    rows: dict[tuple[Side, str], list[str]] = collections.defaultdict(list)
    for where, name, why in pair.pairing.dropped:
        rows["first" if where == "first" else "second", why].append(name)
    for (side, why), names in rows.items():
        yield f"{listed(names)} of {pair.shown[side]} {'are' if len(names) > 1 else 'is'} left out: {why}"


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
