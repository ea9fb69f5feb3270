"""Evidence that code computes an array: formulas that its lines follow, and order that chance does not explain.

Comes in: an array. Goes out: a decision. A random vector of three numbers rises or falls in a third of all draws, so
order counts only where there are enough numbers for it to be rare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from ..sides.subject import Array

SMOOTH = 1.3
"""Mean square of the steps along an axis, in variances, below which an array looks smooth. It is 2 for numbers drawn at
random, and 0.97 for five positions of a table of sines and cosines with the frequencies 1 to 0.001."""

LONG, SMOOTH_LINE = 16, 0.5
"""From this length on, a line is tested alone against this value of `SMOOTH`. A quarter of the lines of a Fourier basis
are below it; of random lines of that length, one in thousands."""

DEVIATIONS = 3.0
"""Standard deviations below 2 from which on chance does not explain smooth numbers; that of n numbers is 2/sqrt(n)."""

RARE = 1e-4
"""Probability below which chance does not explain that all lines rise, or all fall; 8 random numbers do in 5e-5."""

ULPS = 256.0
"""Units of the last place by which a table may miss its formula: a rounding of each operation, and of a step's factor.
A random vector of three numbers follows one of the formulas within them in one draw of ten thousand."""

_TRANSFORMS: tuple[tuple[Callable[[Array], Array], Callable[[Array], bool]], ...] = (
    (lambda x: x, lambda x: True),
    (np.log, lambda x: bool((x > 0.0).all())),
    (np.reciprocal, lambda x: bool((x != 0.0).all())),
    (np.sqrt, lambda x: bool((x >= 0.0).all())),
    (np.exp, lambda x: bool((np.abs(x) < 30.0).all())),
)
"""Functions after which a table may rise by equal steps, and the numbers that they take: lines, powers, reciprocals,
squares and logarithms of positions."""


def is_computed(numbers: Array, unit: float) -> bool:
    """Return whether numbers follow a formula, or are ordered in a way that chance does not explain.

    Args:
        numbers: an array in float64.
        unit: relative distance from one number to the next in the precision that it was computed in.
    """
    # More than two numbers, and all of them powers of two.
    if np.unique(numbers).size > 2 and bool((np.abs(np.frexp(numbers[numbers != 0.0])[0]) == 0.5).all()):
        return True
    return any(
        _follows_formula(lines, unit) or _rises(lines, rare=True) or _is_smooth(lines, rare=True)
        for lines in _lines(numbers)
    )


def seems_computed(numbers: Array) -> bool:
    """Return whether numbers rise, fall or change little along an axis, by chance or not."""
    return any(_rises(lines) or _is_smooth(lines) for lines in _lines(numbers))


def are_alike(first: Array, second: Array) -> bool:
    """Return whether two arrays are near each other or proportional, as two versions of a table are."""
    if first.size != second.size:
        return False
    left, right = (array.ravel().astype(np.float64) for array in (first, second))
    sizes = float(np.linalg.norm(left)), float(np.linalg.norm(right))
    is_near = float(np.linalg.norm(left - right)) <= NEAR * max(sizes)
    is_proportional = min(sizes) > 0.0 and abs(float(left @ right)) >= (1.0 - PROPORTIONAL) * sizes[0] * sizes[1]
    return is_near or is_proportional


NEAR, PROPORTIONAL = 0.1, 1e-6
"""Distance of two arrays, relative to the larger, and 1 minus the cosine of their angle, up to which they are alike.
Two random vectors of three numbers are so near in one of 2,000 draws."""


def _lines(numbers: Array) -> Iterator[Array]:
    """Yield the array with each axis of at least three numbers as the last."""
    for axis, size in enumerate(numbers.shape):
        if size >= 3:
            yield np.moveaxis(numbers, axis, -1)


def _follows_formula(lines: Array, unit: float) -> bool:
    """Return whether every line has equal steps after a transformation, equal second steps, or is a sine or cosine."""
    if not (np.ptp(lines, axis=-1) > 0.0).all():
        return False
    for transform, takes in _TRANSFORMS:
        if takes(lines):
            moved = transform(lines)
            allowed = ULPS * unit * max(1.0 if transform is np.log else 0.0, float(np.abs(moved).max()))
            if (np.abs(np.diff(moved, 2, axis=-1)) <= allowed).all():
                return True
    if lines.shape[-1] < 4:
        return False
    allowed = ULPS * unit * float(np.abs(lines).max())
    # A parabola has equal second differences.
    if (np.abs(np.diff(lines, 3, axis=-1)) <= allowed).all():
        return True
    # A sine or cosine of equal steps: x[i - 1] + x[i + 1] = 2 cos(step) x[i].
    inner, outer = lines[..., 1:-1], lines[..., :-2] + lines[..., 2:]
    squares = np.maximum((inner**2).sum(-1, keepdims=True), np.finfo(np.float64).tiny)
    factor = (inner * outer).sum(-1, keepdims=True) / squares
    return bool((np.abs(outer - factor * inner) <= allowed).all())


def _rises(lines: Array, *, rare: bool = False) -> bool:
    """Return whether all lines rise, or all fall; with `rare`, only where chance does not explain it."""
    steps = np.diff(lines, axis=-1)
    if not ((steps >= 0).all() or (steps <= 0).all()):
        return False
    size = lines.shape[-1]
    # n random numbers rise with a probability of 1 / n!, and all lines with the power of that; as many fall.
    return not rare or math.log(2.0) - lines.size / size * math.lgamma(size + 1) < math.log(RARE)


def _is_smooth(lines: Array, *, rare: bool = False) -> bool:
    """Return whether numbers change little along a line; with `rare`, only where chance does not explain it.

    A tenth of the lines suffices where they are long.
    """
    rough, spread = (np.diff(lines, axis=-1) ** 2).mean(-1), lines.var(axis=-1)
    limit = min(SMOOTH, 2.0 - DEVIATIONS * 2.0 / math.sqrt(lines.size)) if rare else SMOOTH
    if rough.sum() < limit * spread.sum():
        return True
    few = np.quantile(rough / np.maximum(spread, 1e-300), 0.1)
    return lines.shape[-1] >= LONG and bool(few < SMOOTH_LINE)
