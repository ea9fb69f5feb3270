"""Two tensors that differ, with their context, and named constants to compare ratios with."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

Array = np.ndarray
Arrays = Mapping[str, Array]
Ways = Iterator[tuple[str, Array]]
"""Results that ports compute, each with its description."""

FIT = 1e-9
"""Largest rest, relative to the largest value, of a relation that holds in float64."""

DIFFERS = 1e-11
"""Smallest relative difference that is one."""

CLOSE = 1e-7
"""How close a ratio is to a number that it is named by."""

NAMES = 3
"""Most numbers that a ratio is named by, the simplest first."""

LARGEST = 1 << 17
"""Most elements of a tensor that a layer is computed on."""

MIN = 4
"""Smallest width that a ratio is named by; 2 and 3 are too common to mean one."""

Part = Literal["attention", "embedding", "norm"]

PARTS: dict[Part, re.Pattern[str]] = {
    "attention": re.compile(
        r"(?<!fl)atte?n|mha|num_(kv_)?heads|is_causal|(^|[\s._])(q|k|qkv|query|key)(_?proj)?($|[\s._])"
    ),
    "embedding": re.compile(r"emb|lookup|vocab|padding_idx|(^|[\s._])(wte|wpe)($|[\s._])"),
    "norm": re.compile(r"norm|rms|(^|[\s._])(ln|bn|gn|eps)(_?\w)?($|[\s._])"),
}
"""Part of a model -> pattern that its classes, paths, weights or settings match."""


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
        words: classes, paths, weights and settings of the submodule or gap, in lower case.
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
    words: str = ""
    around: Sequence[Array] = ()

    def may_hold(self, part: Part) -> bool:
        """Return whether names suggest that it contains a part, which causes within that part require."""
        return PARTS[part].search(self.words) is not None

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
        """Whether the two are finite, of one shape and not the same."""
        if self.first.shape != self.second.shape or not self.first.size:
            return False
        finite = np.isfinite(self.first).all() and np.isfinite(self.second).all()
        return bool(finite and float(np.abs(self.apart).max()) > DIFFERS * self.scale)


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


def widths_of(case: Case) -> list[int]:
    """Return the sizes of axes that a scale may be made of, and parts of them that may be a head's width.

    Where the outputs agree, only the backward pass of attention has such a scale.
    """
    if case.is_gradient and not case.may_hold("attention"):
        return []
    ends = [one.shape[-1] for one in (case.first, *case.inputs) if one.ndim]
    sizes = {*ends, *(size for one in case.weights.values() for size in one.shape), *case.counts}
    sizes |= {size // count for size in ends for count in case.counts if count and size % count == 0}
    parts = {size // part for size in sizes for part in (2, 4, 8, 16) if size % part == 0}
    return sorted(int(size) for size in sizes | parts if MIN <= size <= 1 << 16)


PLAIN: dict[str, float] = {
    text.format(number): function(number)
    for number in (2, 3)
    for text, function in (
        ("{}", float),
        ("sqrt({})", math.sqrt),
        ("1/sqrt({})", lambda number: 1 / math.sqrt(number)),
        ("1/{}", lambda number: 1 / number),
    )
}
"""Usual factors in code (the gain of a ReLU, the mean of two branches): that two widths have such a ratio is evidence
only where attention is, or a setting gives the width."""


def scale_named(ratio: float, case: Case) -> str:
    """Name a ratio by a plain number, or by the widths of a place that it may be made of."""
    plain = next((text for text, number in PLAIN.items() if abs(abs(ratio) / number - 1) < CLOSE), "")
    if not plain:
        return named(ratio, widths_of(case))
    sign = "-" if ratio < 0 else ""
    widths = named(ratio, widths_of(case)) if case.counts or case.may_hold("attention") else ""
    if "width" not in widths:
        return f" = {sign}{plain}: consistent with another scale"
    return f" = {sign}{plain}{widths.partition(':')[0]}: consistent with a scale by this number or by another width"


def named(ratio: float, widths: Sequence[int]) -> str:
    """Name a ratio by the widths that it may be made of."""
    magnitude = abs(ratio)
    if math.isclose(ratio, -1.0, rel_tol=1e-9):
        return ": the sign is exchanged"
    sign = "-" if ratio < 0 else ""
    if magnitude == 0:
        return ""
    names = [
        text.format(width)
        for power, text in ((1.0, "{}"), (0.5, "sqrt({})"), (-0.5, "1/sqrt({})"), (-1.0, "1/{}"))
        for width in widths
        if abs(magnitude / width**power - 1) < CLOSE
    ]
    for numerator, denominator in itertools.permutations(widths, 2):
        if abs(magnitude / math.sqrt(numerator / denominator) - 1) < CLOSE:
            names.append(f"sqrt({numerator}/{denominator})")
    if not names:
        return ": consistent with another scale"
    return f" = {' = '.join(sign + one for one in names[:NAMES])}: consistent with a scale by another width"


def divisors(size: int) -> list[int]:
    """Return the head widths that divide this number of channels, the whole first; at most 24, all above 1."""
    return [size // parts for parts in range(1, size) if size % parts == 0][:24]
