"""The state of both sides: which of it takes part in the pairing, whose numbers are not drawn, and notes on both.

Comes in: a pair, a pairing, arrays. Goes out: names, numbers, decisions and notes for the report. State that is carried
counts among the parameters of its side, in the subject as in the weights that the pair holds. Nothing here runs a side.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from attn_bridge.printable import listed

from ..pair import SIDES, Pair, weights_held
from ..pairing import Match, Pairing, Suited, Tensor, whole
from ..results.findings import Side
from ..samples import calls
from ..sides.arrays import class_of, is_float, unit_of, wide
from ..sides.subject import Array, Arrays, SideWeight, Subject
from .formulas import are_alike, is_computed, seems_computed

NamedParameters = dict[str, SideWeight]

IDLE = "no effect on the outputs"
"""Why a parameter is set aside that no output depends on."""

FROZEN = "frozen"
"""How the reason begins for which a frozen parameter is set aside."""

DISTINCT = 0.9
"""An array is taken for a table if the share of distinct sizes among its numbers is below this. Of 16,384 uniform
draws, which have 2**23 values, all but a thousandth are distinct; of a square table of cosines less than a quarter."""

WRITTEN_DIGITS, MAX_LOOKED_AT = 5, 64
"""Significant digits up to which a number is taken for one that code has written, and how many numbers are looked at.
At most one in 200 random numbers of float32 has as few."""


class Carrying:
    """Keeps which state of a pair is carried.

    Args:
        pair: the pair.

    Attributes:
        parameters: the parameters of each side.
        state: the state of each side.
    """

    def __init__(self, pair: Pair):
        self._pair = pair
        self.parameters, self.state = _parted(pair)
        self._names: dict[Side, frozenset[str]] = {"first": frozenset(), "second": frozenset()}
        self._numbers: dict[Side, Arrays] = {}

    @property
    def names(self) -> dict[Side, frozenset[str]]:
        """Names of the state that is carried, by side."""
        return dict(self._names)

    def taking_part(self, side: Side) -> NamedParameters:
        """Return the parameters of a side and its state that is carried."""
        carried = {name: one for name, one in self.state[side].items() if name in self._names[side]}
        return {**self.parameters[side], **carried}

    def free(self, side: Side, dropped: Iterable[tuple[str, str, str]]) -> list[Tensor]:
        """Return the state of a side that is neither carried nor dropped."""
        excluded = self._names[side] | {name for where, name, _ in dropped if where == side}
        return [whole(name, one, one.framework) for name, one in self.state[side].items() if name not in excluded]

    def add(self, side: Side, names: Iterable[str]) -> bool:
        """Carry more state, as far as the names are state; return whether any is new."""
        new = self.state[side].keys() & set(names) - self._names[side]
        self.set(side, self._names[side] | new)
        return bool(new)

    def set(self, side: Side, names: frozenset[str]) -> None:
        """Carry the state of these names and no other."""
        if names == self._names[side]:
            return
        subject, weights, numbers = self._pair.subject(side), self._pair.own_weights[side], self.numbers(side)
        self._names[side] = names
        subject.carry(names)
        self._pair.own_weights[side] = {
            name: weights[name] if name in weights else numbers[name] for name in subject.parameters()
        }

    def numbers(self, side: Side) -> Arrays:
        """Return the numbers of all state of a side, in float64 where its parameters were widened."""
        if side not in self._numbers:
            subject, pair_weights = self._pair.subject(side), self._pair.own_weights[side]
            subject.carry(self.state[side])
            weights = weights_held(subject, self._pair.shown[side])
            subject.carry(self._names[side])
            is_widened = calls.common_dtype(pair_weights) == "float64" and not subject.holds_float64
            own = {name: weights[name] for name in self.state[side]}
            self._numbers[side] = {name: wide(one) for name, one in own.items()} if is_widened else own
        return self._numbers[side]

    def are_same(self, suited: Suited) -> bool:
        """Return whether two tensors hold the same numbers, in whatever order of axes."""
        first, second = (np.sort(wide(array), axis=None) for array in self._arrays(suited))
        return bool(np.array_equal(first, second, equal_nan=is_float(first)))

    def may_carry(self, suited: Suited) -> bool:
        """Return whether the first side's numbers may replace the second's: none of the two is computed by code."""
        persistent = suited.first.parameter.persistent and suited.second.parameter.persistent
        first, second = self._arrays(suited)
        return persistent and waits_for_data(second, wide(first)) and not are_two_constants(first, second)

    def _arrays(self, suited: Suited) -> tuple[Array, Array]:
        first, second = ({**self._pair.own_weights[side], **self.numbers(side)} for side in SIDES)
        return suited.first.take(first), suited.second.take(second)


def _parted(pair: Pair) -> tuple[dict[Side, NamedParameters], dict[Side, NamedParameters]]:
    """Return the parameters and the state of both sides.

    Whole numbers and bools in a function's tree are parameters where the other side has a parameter of that name, else
    state.
    """
    every: dict[Side, Mapping[str, SideWeight]] = {side: pair.subject(side).parameters() for side in SIDES}
    parameters: dict[Side, NamedParameters] = {}
    others: dict[Side, NamedParameters] = {}
    for side, other in zip(SIDES, reversed(SIDES), strict=True):
        subject: Subject = pair.subject(side)
        is_tree = subject.kind.endswith("function")
        parameters[side] = {
            name: one
            for name, one in every[side].items()
            if not is_tree or class_of(one.dtype) == "float" or name in every[other]
        }
        rest = {name: one for name, one in every[side].items() if name not in parameters[side]}
        leaves = {name: dataclasses.replace(one, role="state") for name, one in rest.items()}
        others[side] = {**subject.state(), **leaves}
    return parameters, others


def kept(pairing: Pairing, first: Mapping[str, SideWeight]) -> frozenset[str]:
    """Return the first side's weights whose numbers every sample keeps: frozen, dropped, and state on both sides."""
    dropped = {name for side, name, _ in pairing.dropped if side == "first"}
    frozen = {name for name, one in first.items() if one.frozen}
    frozen |= {match.first.source for match in pairing.matches if match.second.parameter.frozen}
    state_on_both = {match.first.source for match in pairing.matches if _roles(match) == ("state", "state")}
    return frozenset(dropped | frozen | state_on_both)


def _roles(match: Match) -> tuple[str, str]:
    return match.first.parameter.role, match.second.parameter.role


def waits_for_data(array: Array, first: Array | None = None) -> bool:
    """Return whether the second side's numbers are first values that data of the first side replace, and not a table.

    Zeros, ones, equal numbers that make a vector of length 1, and numbers without order are first values. One other
    number everywhere, two numbers that repeat, numbers that follow a formula, or are smooth or ordered beyond chance,
    sizes that repeat, and numbers written with few digits are computed or written by code: there a difference is a
    fault, which carrying the first side's would hide.

    Args:
        array: the second side's numbers.
        first: the first side's; where the second side's may be ordered by chance, a table is one that is like these.
    """
    numbers = np.nan_to_num(wide(array).astype(np.float64))
    distinct = np.unique(numbers)
    if array.dtype == bool or distinct.size < min(3, numbers.size) or numbers.size == 1:
        if array.dtype == bool or distinct.size > 1:
            return False
        is_vector = numbers.size > 1 and (first is None or np.unique(first).size > 1)
        return bool(np.isin(distinct, (0.0, 1.0)).all()) or (is_vector and _has_length_1(numbers, _unit(array)))
    if array.dtype in (np.float32, np.float64) and (_repeats(numbers) or _is_written(array)):
        return False
    if is_computed(numbers, _unit(array)):
        return False
    return first is None or not seems_computed(numbers) or not are_alike(first, numbers)


def _has_length_1(numbers: Array, unit: float) -> bool:
    """Return whether a vector has length 1, from which a power iteration starts."""
    return abs(float(np.linalg.norm(numbers)) - 1.0) <= 8 * unit


def is_undecided(array: Array) -> bool:
    """Return whether initial values are ordered like a table, but too few to exclude chance."""
    return waits_for_data(array) and seems_computed(np.nan_to_num(wide(array).astype(np.float64)))


def are_two_constants(first: Array, second: Array) -> bool:
    """Return whether the first side's numbers are constants from code, and the second side's are not initial values.

    Zeros and ones accept any values of the first side and are carried, as rounded data resemble constants.
    """
    if first.dtype not in (np.float32, np.float64) or np.unique(second).size < 2:
        return False
    return _is_written(first) and not waits_for_data(first)


def _repeats(numbers: Array) -> bool:
    """Return whether the sizes of numbers repeat, zeros aside, as in a table of cosines."""
    sizes = np.abs(numbers[numbers != 0.0]).astype(np.float32)
    return bool(sizes.size and np.unique(sizes).size < DISTINCT * sizes.size)


def _is_written(array: Array) -> bool:
    """Return whether all numbers are decimals of few digits, as code has them written."""
    values = array.ravel()[:MAX_LOOKED_AT]
    decimals = np.asarray([f"{value:.{WRITTEN_DIGITS - 1}e}" for value in values], np.float64)
    return bool((decimals.astype(array.dtype) == values).all())


def _unit(array: Array) -> float:
    """Return the unit of the last place that a table was rounded to; whole numbers are exact."""
    return unit_of(array.dtype.name) if is_float(array) else float(np.finfo(np.float64).eps)


def notes(pair: Pair, state: Mapping[Side, Mapping[str, SideWeight]], pairing: Pairing) -> Iterator[str]:
    """Name the state that is carried between parameters and state, and the state that is not carried.

    Args:
        pair: the pair.
        state: the state of each side.
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
    state_matches = [match for match in pairing.matches if _roles(match) == ("state", "state")]
    if state_matches and pair.transfer:
        names = [match.first.name for match in state_matches]
        yield f"state that is carried from {pair.shown['first']} to {pair.shown['second']}: {listed(names)}"
        proposed = [match for match in state_matches if match.how != "rule"]
        names = [one.second.name for one in proposed if is_undecided(one.second.take(pair.own_weights["second"]))]
        if names:
            yield (
                f"carried, as too few numbers of {pair.shown['second']} show whether code computes them; a rule that "
                f"drops them keeps its own: {listed(names)}"
            )
    for side in SIDES:
        settled_names = {match.tensor(side).source for match in pairing.matches}
        settled_names |= {name for where, name, _ in pairing.dropped if where == side}
        left = [name for name in state[side] if name not in settled_names]
        if left:
            label = pair.shown[side]
            yield f"state that is not carried, so that {label} keeps its own: {listed(left)}"


def dropped_notes(pair: Pair) -> Iterator[str]:
    """Yield a note on the tensors left out of the pairing, per side and reason."""
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
