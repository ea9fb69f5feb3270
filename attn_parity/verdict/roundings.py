"""Errors below the rounding of a 16-bit result: whether they are one-sided, and whether float32 explains them.

A right result rounds a number that is close to the exact one. So of each element it is known how far that number was
off at least: the distance of the oracle from the interval of numbers that round to the element. It is zero for most
elements of a right result, also where the element itself is off by half a unit.

Such a distance has either sign where roundings caused it, and one sign where a factor or an approximation did. By
Hoeffding's inequality the sum of n independent signs exceeds z sqrt(n) with a probability of at most exp(-z^2 / 2).
"""

from __future__ import annotations

import math

import numpy as np

from ..sides.dtypes import numpy_dtype, wide
from ..sides.subject import Array
from .measures import RMS_LIMIT, flushed_below

SHORT = ("bfloat16", "float16")
"""Dtypes whose rounding is so coarse that results in float32 are as good as exact."""

FLOAT32_LOSS = 2.0**-17
"""Relative error that float32 explains: 128 units, as sums of thousands of numbers lose."""

SIGNS_FACTOR = 4.5
"""Standard deviations that a sum of signs may reach: two-sided, chance exceeds them in 7 of a million results."""

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
    shares = [_share(*(_by_value(each, oracle) for each in (ours, theirs)))]
    if oracle.ndim > 1:
        rest = tuple(range(oracle.ndim - 1))
        shares += [_share(*(each.sum(axis=axes) for each in (ours, theirs))) for axes in (-1, rest)]
    return min(shares)


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


def _by_value(signs: Array, oracle: Array) -> Array:
    """Return the mean sign of each distinct number of the oracle."""
    _, which, counts = np.unique(oracle, return_inverse=True, return_counts=True)
    means: Array = np.bincount(which.reshape(-1), signs.reshape(-1)) / counts
    return means


def _share(ours: Array, theirs: Array) -> float:
    noise = SIGNS_FACTOR * math.sqrt(float(np.square(ours).sum())) + SECOND_ORDER * float(np.abs(ours).sum())
    allowed = noise + RMS_LIMIT * abs(float(theirs.sum()))
    return abs(float(ours.sum())) / allowed if allowed else 0.0
