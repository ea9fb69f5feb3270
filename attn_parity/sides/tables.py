"""The tables of a side: numbers independent of weights and floating-point inputs, where they meet dependent ones.

Tables in float32 (rotary tables, positions) may explain a difference between two correct sides only if the two tables
have different numbers. Two sides with equal tables in float64 need another explanation. The same holds for literals of
float32 accuracy in code, and for branches of a formula that float32 cannot distinguish. `Branches` notes those that no
run takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

Array = np.ndarray

STILL = -1
"""Seed of the mode ``tables`` that moves nothing, and only looks at what there is."""

SAME = 1e-13
"""Values that are this close, relative to each other, are the same ..."""

SAME_BY_SIZE = 1e-14
"""... or relative to the largest value: the sine of a large angle that is nearly zero has few accurate digits."""

MAX_VALUES = 1 << 20
"""Number of values above which tables are not compared."""

KEPT = 512
"""Values of a table that are kept, evenly over all of them in order."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """The values of all tables of a side, without signs, order and repetition.

    Attributes:
        count: how many there are.
        values: some of them, in order.
    """

    count: int
    values: Sequence[float]

    def equals(self, other: Tables) -> bool:
        """Return whether another side has the same tables."""
        if self.count != other.count or len(self.values) != len(other.values):
            return False
        values = np.asarray(self.values)
        return bool((np.abs(values - np.asarray(other.values)) <= _tolerance(values)).all())


class Collector:
    """Gathers the tables of a side while it runs."""

    def __init__(self) -> None:
        self._values = np.zeros(0)
        self._known: set[tuple[tuple[int, ...], bytes]] = set()
        self._is_full = False

    def add(self, table: Array) -> None:
        """Add an array; whole numbers in it and those that are not finite are left out, as they are never rounded."""
        if table.dtype.kind not in "fc" or self._is_full:
            return
        key = table.shape, table.tobytes()
        if key not in self._known:
            self._known.add(key)
            plain = np.stack([table.real, table.imag]) if table.dtype.kind == "c" else table
            values = np.abs(plain.astype(np.float64, copy=False)).ravel()
            self._values = np.union1d(self._values, values[np.isfinite(values) & (values != np.rint(values))])
            self._is_full = self._values.size > MAX_VALUES

    def found(self) -> Tables | None:
        """Return the tables gathered; None if there were too many values."""
        if self._is_full:
            return None
        values, tolerance = self._values, _tolerance(self._values)
        # What is computed twice is not the same to the last digit, nor is a sine that is meant to be 1.
        own = (np.diff(values, prepend=-np.inf) > tolerance) & (np.abs(values - np.rint(values)) > tolerance)
        values = values[own]
        places = np.unique(np.linspace(0, max(len(values) - 1, 0), min(KEPT, len(values))).astype(int))
        return Tables(len(values), [float(one) for one in values[places]])


def _tolerance(values: Array) -> Array:
    tolerance: Array = SAME * values + SAME_BY_SIZE * max(1.0, float(values.max(initial=0.0)))
    return tolerance


ROUNDOFF = 2.0**-24
"""Unit roundoff of float32."""

SOFTPLUS_THRESHOLD = 25.0 * math.log(2.0)
"""Threshold of softplus from which on float32 shows no difference between its two branches."""

EXACT_THRESHOLD = 40.0
"""Threshold of softplus from which on float64 shows none: exp(-40) is below 2**-53 of 40."""

EXACT_DIGITS = 16
"""Significant digits from which on a literal is exact in float64."""


SHORT_BITS = 12
"""Bits of a mantissa of 24 that are zero in numbers that are meant as they are, such as 2**-30."""


def slack(value: float) -> float:
    """Return the possible rounding error of a literal; 0 if float32 would show it or the literal is exact.

    A literal is a decimal number of few digits, or a number that was computed in float32, as `torch.tensor(2.0).log()`.
    """
    if not math.isfinite(value) or value == 0.0:
        return 0.0
    mantissa_of_24 = math.frexp(value)[0] * 2.0**24
    if mantissa_of_24 == int(mantissa_of_24) and int(mantissa_of_24) % (1 << SHORT_BITS):
        return ROUNDOFF * abs(value)
    mantissa, _, exponent = f"{value!r}".lower().partition("e")
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    fraction = fraction.rstrip("0")
    digits = (whole + fraction).lstrip("0").rstrip("0")
    last = 10.0 ** (int(exponent or 0) - len(fraction))
    if not fraction or len(digits) >= EXACT_DIGITS or 0.5 * last > ROUNDOFF * abs(value):
        return 0.0
    return min(last, ROUNDOFF * abs(value))


def moved(value: float, seed: int) -> float:
    """Return a literal moved by its slack; the same one moves alike wherever it stands.

    Seed 0 moves all of them up, seed 1 some up and some down, so that they don't make up for each other in both.
    """
    down = seed % 2 and math.frexp(value)[0] * 2.0**20 % 2.0 < 1.0
    return value - slack(value) if down else value + slack(value)


def close(first: Array, second: Array) -> Array:
    """Return a mask of the elements at which two branches differ by less than float32 resolves."""
    with np.errstate(all="ignore"):
        apart = np.abs(first - second)
        is_close: Array = (
            (apart > 0.0) & (apart <= ROUNDOFF * np.maximum(np.abs(first), np.abs(second))) & np.isfinite(apart)
        )
    return is_close


# ---- branches

MOST_NAMED = 4
"""Most branches of a side that are named."""

CONDITION = "its condition is always"


class Branches:
    """The branches that runs of a side took.

    A branch that no sample takes may hold any numbers: the sides are equal without it.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str, str], set[bool]] = {}
        self._compared: dict[tuple[str, str], tuple[set[bool], set[int]]] = {}

    def choose(self, name: str, where: str, condition: Array, first: Array | None, second: Array | None) -> None:
        """Note a choice between numbers by a condition; None for branches whose numbers are not known."""
        outcomes = {outcome for outcome, taken in ((True, condition.any()), (False, not condition.all())) if taken}
        if len(outcomes) == 1 and first is not None and second is not None and bool(np.all(first == second)):
            outcomes = {True, False}  # both branches have the same numbers
        self._add(f"{name} ({where})", f"{CONDITION} true", f"{CONDITION} false", outcomes)

    def limit(self, name: str, where: str, values: Array, bound: Array, *, upper: bool) -> None:
        """Note a bound of numbers."""
        which = f"its {'upper' if upper else 'lower'} bound"
        beyond, inside = (values > bound, values < bound) if upper else (values < bound, values > bound)
        outcomes = {outcome for outcome, reached in ((True, beyond), (False, inside)) if np.any(reached)}
        self._add(f"{name} ({where})", f"every number is beyond {which}", f"no number reaches {which}", outcomes)

    def extreme(self, name: str, where: str, first: Array, second: Array, *, larger: bool) -> None:
        """Note the larger or the smaller of two arrays; one of equal numbers is a bound."""
        for values, bound in ((first, second), (second, first)):
            if bound.size and (bound == bound.flat[0]).all():
                self.limit(name, where, values, bound, upper=not larger)
                return
        ways = ((larger, first > second), (not larger, first < second))
        outcomes = {outcome for outcome, taken in ways if np.any(taken)}
        always = "it always takes its"
        self._add(f"{name} ({where})", f"{always} first operand", f"{always} second operand", outcomes)

    def compare(self, sign: str, where: str, operands: Sequence[Array], outcome: Array) -> None:
        """Note a comparison of whole numbers, such as distances, with one number other than 0.

        Zero is left out: code that checks whether an index counts from the end compares with it.
        """
        if any(operand.dtype.kind not in "iu" for operand in operands):
            return
        uniform = [bool((operand == operand.flat[0]).all()) for operand in operands]
        if sum(uniform) == 1 and (bound := operands[uniform.index(True)].flat[0]):
            from_left = sign if uniform[1] else sign.translate(str.maketrans("<>", "><"))
            outcomes, bounds = self._compared.setdefault((from_left, where), (set(), set()))
            outcomes.update(bool(result) for result in np.unique(outcome))
            bounds.add(int(bound))

    def join(self, other: Branches) -> None:
        """Add the branches that other runs took."""
        for key, outcomes in other._taken.items():
            self._taken.setdefault(key, set()).update(outcomes)
        for at, (results, bounds) in other._compared.items():
            own_results, own_bounds = self._compared.setdefault(at, (set(), set()))
            own_results.update(results)
            own_bounds.update(bounds)

    def untaken(self, label: str, *, conditions: bool) -> Iterator[str]:
        """Yield the choices of which no run took one branch, in words.

        A choice by a comparison of the same line and outcome is left out for the comparison.

        Args:
            label: of the side.
            conditions: whether choices by a condition count, which may follow from a mask that hides nothing.
        """
        always = {(where, *results) for (_, where), (results, _) in self._compared.items() if len(results) == 1}
        alone = [
            f"{label}'s {choice}: {yes if True in outcomes else no}"
            for (choice, yes, no), outcomes in self._taken.items()
            if len(outcomes) == 1
            and not (
                yes.startswith(CONDITION)
                and (not conditions or any(choice.endswith(f"({where})") and one in outcomes for where, one in always))
            )
        ]
        # A loop may compare with another number in each turn.
        compared = [
            f"{label}'s comparison {sign}{f' {min(bounds)}' if len(bounds) == 1 else ''} ({where}): it is always "
            f"{'true' if True in results else 'false'}"
            for (sign, where), (results, bounds) in self._compared.items()
            if len(results) == 1
        ]
        yield from compared[:MOST_NAMED]
        yield from alone[:MOST_NAMED]
        if len(alone) > MOST_NAMED:
            yield f"branches of {len(alone) - MOST_NAMED} more choices of {label}"
        if len(compared) > MOST_NAMED:
            yield f"outcomes of {len(compared) - MOST_NAMED} more comparisons of {label}"

    def _add(self, choice: str, yes: str, no: str, outcomes: set[bool]) -> None:
        self._taken.setdefault((choice, yes, no), set()).update(outcomes)
