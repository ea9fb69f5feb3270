"""Two tensors that differ, with their context, and ratios of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

Array = np.ndarray
Arrays = Mapping[str, Array]
Ways = Iterator[tuple[str, Array]]
"""Results that ports compute, each with its description."""

FIT = 1e-9
"""Largest rest, relative to the largest value, of a relation that holds in float64."""

LARGEST = 1 << 17
"""Most elements of a tensor that a layer is computed on."""

MOST_WHOLE = 1 << 10
"""Largest whole number whose root or inverse a ratio is written as."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One pair of tensors that differs, with its context.

    Attributes:
        name: ``the output`` or ``the gradient of fc.weight``.
        first: the tensor of the first side.
        second: the tensor of the second side.
        inputs: inputs of the submodule or gap.
        weights: its weights, from the first side.
        labels: names of the sides in messages.
        is_gradient: whether the tensor is a gradient.
        counts: integers in the settings of both sides: numbers of heads, widths of a head.
        around: inputs of the module around it, for code between two submodules.
    """

    name: str
    first: Array
    second: Array
    inputs: Sequence[Array]
    weights: Arrays
    labels: tuple[str, str]
    is_gradient: bool = False
    counts: Sequence[int] = ()
    around: Sequence[Array] = ()

    @property
    def apart(self) -> Array:
        """The difference, second minus first."""
        return np.asarray(self.second - self.first)

    @property
    def scale(self) -> float:
        """The largest value of both."""
        return max(float(np.abs(self.first).max(initial=0.0)), float(np.abs(self.second).max(initial=0.0)))

    def fits(self, first: Array, second: Array) -> bool:
        """Return whether two arrays are the same but for rounding in float64."""
        if first.shape != second.shape:
            return False
        scale = max(float(np.abs(first).max(initial=0.0)), float(np.abs(second).max(initial=0.0)))
        return bool(scale > 0 and float(np.abs(first - second).max(initial=0.0)) <= FIT * scale)

    @property
    def is_real(self) -> bool:
        """Whether neither is complex."""
        return not (np.iscomplexobj(self.first) or np.iscomplexobj(self.second))

    def is_small(self, *, inputs: bool = False) -> bool:
        """Return whether it is a result of at most `LARGEST` elements; inputs, if they count, have 1 to as many."""
        sizes = [self.first.size, *(given.size for given in self.inputs if inputs)]
        return not self.is_gradient and min(sizes) > 0 and max(sizes) <= LARGEST

    @property
    def differs(self) -> bool:
        """Whether the two are finite, of one shape and further apart than `FIT`: below, they fit any relation."""
        if self.first.shape != self.second.shape or not self.first.size:
            return False
        finite = np.isfinite(self.first).all() and np.isfinite(self.second).all()
        return bool(finite and float(np.abs(self.apart).max()) > FIT * self.scale)


def first_fit(case: Case, ways: Ways) -> str:
    """Return the ways that give the first side's result and the second's, if both are found and differ."""
    ours = its = ""
    for name, value in ways:
        ours = ours or (name if case.fits(case.first, value) else "")
        its = its or (name if case.fits(case.second, value) else "")
        if ours and its:
            return f"{case.labels[0]} computes {ours}, {case.labels[1]} {its}" if ours != its else ""
    return ""


def computed(ways: Callable[[Case], Ways], *, inputs: bool = False) -> Callable[[Case], str]:
    """Return the relation of the results that `ways` yields for a case, if that is small; see `Case.is_small`."""
    return lambda case: first_fit(case, ways(case)) if case.is_small(inputs=inputs) else ""


# ---- numbers with names


def ratio_of(first: Array, second: Array) -> float | None:
    """Return by how much an array has to be multiplied to be the other one; None if there is no such number."""
    square = float(np.sum(first * first))
    if not square or not math.isfinite(square):
        return None
    ratio = float(np.sum(first * second)) / square
    scale = max(float(np.abs(second).max()), abs(ratio) * float(np.abs(first).max()))
    if not scale or float(np.abs(ratio * first - second).max()) > FIT * scale:
        return None
    return ratio


def written(ratio: float) -> str:
    """Return a ratio with 6 digits, and as a root or one over a whole number where it has more and is one."""
    is_short = math.isclose(ratio, float(f"{ratio:.3g}"), rel_tol=FIT) or not 1 / MOST_WHOLE <= abs(ratio) <= MOST_WHOLE
    for power, text in () if is_short else ((-1.0, "1/{}"), (0.5, "sqrt({})"), (-0.5, "1/sqrt({})")):
        whole = round(abs(ratio) ** (1 / power))
        if 1 < whole <= MOST_WHOLE and math.isclose(whole**power, abs(ratio), rel_tol=FIT):
            return f"{ratio:.6g} = {'-' if ratio < 0 else ''}{text.format(whole)}"
    return f"{ratio:.6g}"


def divisors(size: int) -> list[int]:
    """Return the head widths that divide this number of channels, the whole first; at most 24, all above 1."""
    return [size // parts for parts in range(1, size) if size % parts == 0][:24]
