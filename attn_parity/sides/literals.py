"""Differences that no float32 run can show: literals written with the digits of float32, and branches of a formula.

The unit roundoff of float32 is u = 2**-24: two numbers closer than u, relative to the larger, may be the same float32.

- A literal of n significant digits is off by up to one unit of its last digit (where it was cut off) from the number
  that it stands for. If half of that unit is at most u, float32 rounds it as it rounds the number itself, to within
  its own unit: 0.79788456 for sqrt(2/pi). Such a literal may move by that unit, and by u at most. A literal with fewer
  digits (0.044715, 1e-5) is a decision, and one with 16 or more is exact in float64: neither moves.
- Two branches of a `where` that are closer than u are one number to float32, so either may be taken.
- softplus(x) - x = log(1 + exp(-x)) is below u / 2 from x = 25 log(2) on. A threshold
  at or above that is such a branch.
"""

from __future__ import annotations

import math

import numpy as np

from .subject import Array

ROUNDOFF = 2.0**-24
"""Unit roundoff of float32."""

SOFTPLUS_THRESHOLD = 25.0 * math.log(2.0)
"""Threshold of softplus from which on float32 shows no difference between its two branches."""

EXACT_THRESHOLD = 40.0
"""Threshold of softplus from which on float64 shows none: exp(-40) is below 2**-53 of 40."""

EXACT_DIGITS = 16
"""Significant digits from which on a literal is exact in float64."""


def slack(value: float) -> float:
    """Return how far a literal may be from the number that it stands for; 0 where float32 would show it."""
    if not math.isfinite(value) or value == 0.0:
        return 0.0
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


def close(one: Array, two: Array) -> Array:
    """Return where two branches are not the same, and closer than float32 tells apart."""
    with np.errstate(all="ignore"):
        apart = np.abs(one - two)
        found: Array = (apart > 0.0) & (apart <= ROUNDOFF * np.maximum(np.abs(one), np.abs(two))) & np.isfinite(apart)
    return found
