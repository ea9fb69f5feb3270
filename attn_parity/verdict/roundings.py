"""Errors below the rounding of a 16-bit result: whether they are one-sided, and whether float32 explains them.

A right result rounds a number that is close to the exact one. So of each element it is known how far that number was
off at least: the distance of the oracle from the interval of numbers that round to the element. It is zero for most
elements of a right result, also where the element itself is off by half a unit.

Such a distance has either sign where roundings caused it, and one sign where a factor or an approximation did. By
Hoeffding's inequality the sum of n independent signs exceeds z sqrt(n) with a probability of at most exp(-z^2 / 2).

Elements that stay put count, too. Of the M numbers that are closer than a window to the middle between two neighbours,
an error crosses the middle in one direction or not at all: a systematic error moves all that are on its side, and none
of the others; symmetric errors move at most half of both. So n signs among them have the variance of draws without
replacement, n (1 - n / M), as in Fisher's exact test, and show an error in half as many elements.
"""

from __future__ import annotations

import math

import numpy as np

from ..sides.arrays import numpy_dtype, wide
from ..sides.subject import Array
from .measures import RMS_LIMIT, flushed_below

SHORT = ("bfloat16", "float16")
"""Dtypes whose rounding is so coarse that results in float32 are as good as exact."""

FLOAT32_LOSS = 2.0**-17
"""Relative error that float32 explains: 128 units, as sums of thousands of numbers lose."""

WINDOWS = tuple(2.0**-power for power in range(10, 17))
"""Relative distances from the middle of two neighbours: errors between two of them lose a quarter of their count."""

SIGNS_FACTOR = 4.8
"""Standard deviations that a sum of signs may reach: two-sided, chance exceeds them in 1.6 of a million sums, so in at
most 13 of a million results, as each has a sum per window and that of all elements."""

SECOND_ORDER = 0.01
"""Share of the signs that may be one-sided. Of an error e before an exponential or a quotient, e^2 / 2 is; bfloat16
scores of softmax have errors of up to 0.02."""

MOST_LARGER = 4
"""Elements with an error beyond float32's that chance may show where `trusted` shows none."""


def one_sided(got: Array, trusted: Array, oracle: Array) -> float:
    """Return the excess of errors of one sign in a 16-bit result, as a share of the allowance.

    Errors may be shared: by equal numbers, along a row (the denominator of a softmax), or down a column (a rounded
    weight). Each of these groups counts as one draw; the grouping that allows most decides. `trusted` may be one-sided
    itself, which allows three times as much.
    """
    ours, theirs = (_signs(each, oracle) for each in (got, trusted))
    if not ours.any():
        return 0.0
    _, values, counts = np.unique(oracle, return_inverse=True, return_counts=True)
    rest = tuple(range(oracle.ndim - 1))

    def share(arrays: tuple[Array, Array]) -> float:
        means = (np.bincount(values.reshape(-1), each.reshape(-1)) / counts for each in arrays)
        lines = [tuple(each.sum(axis=axes) for each in arrays) for axes in (-1, rest) if oracle.ndim > 1]
        return min(_share(*sums) for sums in (tuple(means), *lines))

    middle = _middle(oracle, got.dtype.name)
    near = [(np.abs(middle) > FLOAT32_LOSS) & (np.abs(middle) <= width) for width in WINDOWS]
    centred = [(_centred(ours, middle, where), _centred(theirs, middle, where)) for where in near if where.any()]
    return max(share(both) for both in [(ours, theirs), *centred])


def beyond_float32(got: Array, trusted: Array, oracle: Array, terms: int = 1) -> tuple[float, int]:
    """Return the number of elements whose error float32 does not explain, as a share of the allowance and as it is.

    Args:
        got: 16-bit result that is computed in float32 and rounded once.
        trusted: 16-bit result; three times the number of its elements that float32 does not explain is allowed.
        oracle: exact result in float64.
        terms: how many numbers an element is the sum of; their errors grow with the square root.
    """
    valid = _valid(got, trusted, oracle)
    size = math.sqrt(float(np.mean(np.square(oracle[valid])))) if valid.any() else 0.0
    # A sum that cancels has the errors of its summands, which are as large as those of other sums of the array.
    # FLOAT32_LOSS is for sums of up to 4,096 numbers; roundings of longer ones grow with the root of their number.
    limit = FLOAT32_LOSS * max(1.0, math.sqrt(terms / 4096)) * np.maximum(np.abs(oracle), size)
    ours, theirs = (int((np.abs(distance(each, oracle))[valid] > limit[valid]).sum()) for each in (got, trusted))
    return ours / (RMS_LIMIT * theirs + MOST_LARGER), ours


def distance(result: Array, oracle: Array) -> Array:
    """Return how far the oracle is from the numbers that round to each element, positive where these are larger."""
    finite = np.where(np.isfinite(wide(result)), result, np.zeros_like(result))
    values = wide(finite)
    number = numpy_dtype(finite.dtype.name).type
    with np.errstate(over="ignore"):
        below, above = (wide(np.nextafter(finite, number(end))) for end in (-np.inf, np.inf))
    # The neighbour of the largest number is an infinity; numbers up to half a unit above round to the largest.
    below, above = (np.where(np.isfinite(x), x, 2 * values - y) for x, y in ((below, above), (above, below)))
    # Rounding to nearest: the numbers between the two middles are those that round to the element.
    lower, upper = (values + below) / 2, (values + above) / 2
    apart: Array = np.maximum(lower - oracle, 0.0) + np.minimum(upper - oracle, 0.0)
    return apart


def _valid(got: Array, trusted: Array, oracle: Array) -> Array:
    """Return the elements that are finite in all three, and too large to be flushed to zero."""
    finite = np.logical_and.reduce([np.isfinite(wide(each)) for each in (got, trusted, oracle)])
    valid: Array = finite & (np.abs(oracle) > flushed_below(got.dtype.name))
    return valid


def _signs(result: Array, oracle: Array) -> Array:
    """Return 1 where a result is too far from zero by more than float32 explains, -1 where too close, and else 0."""
    apart = np.where(_valid(result, result, oracle), distance(result, oracle) * np.sign(oracle), 0.0)
    signs: Array = np.where(np.abs(apart) > FLOAT32_LOSS * np.abs(oracle), np.sign(apart), 0.0)
    return signs


def _middle(oracle: Array, dtype: str) -> Array:
    """Return the relative distance of each number from the nearest middle of two neighbours of a dtype.

    It is positive where that middle is further from zero than the number.
    """
    rounded = np.abs(oracle).astype(numpy_dtype(dtype))
    number, size = rounded.dtype.type, np.abs(oracle)
    beyond = size > wide(rounded)
    # The middle on the number's own side of its rounding is the nearest one.
    neighbour = np.where(beyond, np.nextafter(rounded, number(np.inf)), np.nextafter(rounded, number(0)))
    with np.errstate(all="ignore"):
        apart: Array = ((wide(rounded) + wide(neighbour)) / 2 - size) / size
    return np.where(np.isfinite(apart), apart, 1.0)


def _centred(signs: Array, middle: Array, where: Array) -> Array:
    """Return the signs of the elements near a middle, without the mean share of them that cross it."""
    towards = np.sign(middle)
    crossing = float((signs * towards)[where].mean())
    centred: Array = np.where(where, signs - crossing * towards, 0.0)
    return centred


def _share(ours: Array, theirs: Array) -> float:
    noise = SIGNS_FACTOR * math.sqrt(float(np.square(ours).sum())) + SECOND_ORDER * float(np.abs(ours).sum())
    allowed = noise + RMS_LIMIT * abs(float(theirs.sum()))
    return abs(float(ours.sum())) / allowed if allowed else 0.0
