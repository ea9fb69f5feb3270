"""The criterion for three arrays: a result, a trusted result of the same precision, and a float64 oracle.

In 16 bits, the rounding of the result hides errors of up to half a unit, 2**-9 in bfloat16. `roundings` finds those
that are systematic by their signs, and any if the result claims to be rounded once.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..results.findings import TensorVerdict, Verdict
from ..results.precision import Precision, WorstElement
from ..results.report import ParityError
from ..samples.calls import to_numpy
from ..sides.arrays import DTYPES, is_float, wide
from ..sides.subject import Array
from .criterion import decide
from .measures import GROUP_FACTOR, Measure, flushed_below, measure, scale_of, sum_floor
from .roundings import SHORT, beyond_float32, one_sided

FEW = 64
"""Elements below which chance decides: `trusted` may be exact by luck, as a single group of `compare` may."""

LEAST_LARGEST = 1.0
"""Units that the largest error of `trusted` counts as at least, in float32: libraries document their elementary
functions to 1 or 2 units, and a `trusted` that rounds each element right must not refuse them."""


def as_precise(got: object, trusted: object, oracle: object, *, terms: int = 1, rounds_once: bool = False) -> Precision:
    """Judge whether an array is as precise as a trusted one, by the criterion of `compare`; NumPy alone is needed.

    With an error being the distance from the oracle, and the floor half a unit in the last place of the oracle's
    largest value::

        rms(error of got) <= 3 rms(error of trusted) + floor
        max|error of got| <= 5 max|error of trusted| + floor

    In bfloat16 and float16, the errors that are larger than rounding explains must have both signs, too: that shows a
    systematic error that is smaller than the rounding of each element.

    Args:
        got: the array to judge, such as a kernel's result: float32, bfloat16, float16 or float64; NumPy's, torch's,
            JAX's, or anything with ``__array__`` or ``__dlpack__``.
        trusted: a result of the same dtype and shape that rounds as it should, such as the plain formula's.
        oracle: the exact result in float64, from the inputs as they were rounded for the others.
        terms: how many numbers an element is the sum of. In float32 the floor grows with their square root, as that of
            a parameter's gradient does in `compare`, so that long sums may be added in any order.
        rounds_once: in bfloat16 and float16, require that `got` is computed in float32 and rounded once, at the end.
            That finds sums in 16 bits, and weights rounded on the way, which a right kernel may do otherwise.

    Raises:
        TypeError: an argument is not an array of floating-point numbers, or `rounds_once` is not a bool.
        ValueError: the shapes or the dtypes of `got` and `trusted` differ, or the oracle is not float64.
    """
    if isinstance(terms, bool) or not isinstance(terms, int) or terms < 1:
        raise ValueError(f"terms ({terms}) must be a whole number from 1")
    if not isinstance(rounds_once, bool):
        raise TypeError(f"rounds_once ({rounds_once!r}) must be True or False")
    with np.errstate(all="ignore"):
        return _judged(*_arrays(got, trusted, oracle), terms, rounds_once)


def assert_as_precise(
    got: object, trusted: object, oracle: object, *, terms: int = 1, rounds_once: bool = False
) -> None:
    """Check that an array is as precise as a trusted one; see `as_precise`.

    Args:
        got: the array to judge.
        trusted: a result of the same dtype and shape that rounds as it should.
        oracle: the exact result in float64.
        terms: how many numbers an element is the sum of.
        rounds_once: whether to require one rounding, at the end; see `as_precise`.

    Raises:
        ParityError: (an AssertionError) it is not; the message has the verdict, the share of the allowed error, the
            index of the worst element and its three values.
        TypeError: see `as_precise`.
        ValueError: see `as_precise`.
    """
    __tracebackhide__ = True  # pytest shows the line of the test that calls this
    result = as_precise(got, trusted, oracle, terms=terms, rounds_once=rounds_once)
    if not result.passed:
        raise ParityError(result)


def _arrays(got: object, trusted: object, oracle: object) -> tuple[Array, Array, Array]:
    named = {name: _array(name, value) for name, value in (("got", got), ("trusted", trusted), ("oracle", oracle))}
    ours, theirs, truth = named.values()
    if ours.dtype.name not in DTYPES:
        raise TypeError(f"got ({ours.dtype.name}) must be one of {', '.join(DTYPES)}")
    if theirs.dtype != ours.dtype:
        raise ValueError(f"trusted ({theirs.dtype.name}) must have the dtype of got ({ours.dtype.name})")
    if truth.dtype != np.float64:
        raise ValueError(f"oracle ({truth.dtype.name}) must be float64")
    for name, array in list(named.items())[1:]:
        if array.shape != ours.shape:
            raise ValueError(f"{name} {list(array.shape)} must have the shape of got {list(ours.shape)}")
    return ours, theirs, truth


def _array(name: str, value: object) -> Array:
    """Return an argument as a NumPy array."""
    # DLPack only where `__array__` is missing: it refuses arrays that need a gradient, and bfloat16 in NumPy.
    array = to_numpy(value)
    if not isinstance(array, np.ndarray) and hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        array = np.from_dlpack(value)
    if not hasattr(array, "__array__"):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    array = np.asarray(array)
    if not is_float(array):
        raise TypeError(f"{name} ({array.dtype.name}) must hold floating-point numbers")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _judged(got: Array, trusted: Array, oracle: Array, terms: int, rounds_once: bool) -> Precision:
    dtype, arrays = got.dtype.name, (wide(got), wide(trusted), oracle)
    measured = _measured(got, trusted, oracle)
    short = dtype in SHORT and measured.finite > 0
    noise = 0.0 if dtype in SHORT else sum_floor(dtype, terms)
    base = decide("got", "trusted", "output", (), dtype, [measured], noise=noise, sides=("first",))
    bias = one_sided(got, trusted, oracle) if short else None
    hidden, number = beyond_float32(got, trusted, oracle, terms) if short and rounds_once else (0.0, 0)
    verdict, message, index = _verdict(base, measured, arrays)
    if verdict == "equal" and max(bias or 0.0, hidden) > 1.0:
        verdict = "precision"
        message = (
            "its errors have one sign: a factor or an approximation is off by less than the rounding of an element"
            if (bias or 0.0) > 1.0
            else f"{number} of {got.size} elements are not float32's results, rounded once"
        )
    index = measured.rounded.index if index is None and measured.rounded is not None else index
    share = max(base.first_used or 0.0, bias or 0.0, hidden)
    return Precision(
        verdict=verdict,
        share=math.inf if verdict == "different" and share <= 1.0 else share,
        worst=WorstElement(index, *(float(each[index]) for each in arrays)) if got.size and index is not None else None,
        message=message,
        dtype=dtype,
        shape=got.shape,
        got_ulps=base.first_ulps or 0.0,
        trusted_ulps=base.second_ulps or 0.0,
        bias_share=bias,
    )


def _measured(got: Array, trusted: Array, oracle: Array) -> Measure:
    """Return the measure of two results and their oracle, without meaning: `got` has no run in float64."""
    name = got.dtype.name
    measured = measure(got, trusted, oracle, oracle, kind_scale=0.0, dtype=name, group=0, weights="held", sample=0)
    largest = max(measured.second_max, LEAST_LARGEST) if name == "float32" and measured.scale else measured.second_max
    return dataclasses.replace(measured, meaning=None, second_max=largest)


def _verdict(
    base: TensorVerdict, measured: Measure, arrays: tuple[Array, Array, Array]
) -> tuple[Verdict, str, tuple[int, ...] | None]:
    """Return the verdict, its reason, and the element that shows it, None for the one with the largest error."""
    got, trusted, oracle = arrays
    if not got.size:
        return "inconclusive", "the arrays hold no element", None
    ours, theirs, truth = (np.isfinite(each) for each in arrays)
    same = (np.isnan(got) & np.isnan(trusted)) | (got == trusted)
    unlike = (truth & theirs & ~ours) | (~truth & ~theirs & ~same)
    if unlike.any():
        message = f"got must be finite, infinite or NaN where trusted is; {_count(unlike)} are not"
        return "different", message, _first(unlike)
    overflown = truth & ~theirs & ~ours  # in both: inf or NaN follows from the order of operations
    unfit = (truth != theirs) & ~overflown
    if unfit.any():
        message = f"trusted must be finite where the oracle is, and only there; {_count(unfit)} are not"
        return "inconclusive", message, _first(unfit)
    if not measured.finite:
        return "inconclusive", "no element is finite in all three, so nothing was compared", None
    if measured.is_flushed:
        largest, least = scale_of([oracle]), flushed_below(base.dtype)
        return (
            "inconclusive",
            f"the largest value ({largest:.3g}) must be above {least:.3g}: smaller ones may be flushed to zero",
            None,
        )
    used = base.first_used or 0.0
    if used > 1.0:
        message = f"its rounding error is {base.first_ulps:.3g} ulps, that of trusted {base.second_ulps:.3g}"
        if got.size < FEW and used <= GROUP_FACTOR:
            return "inconclusive", f"{message}, which {got.size} elements may show by chance: give {FEW} or more", None
        return base.verdict, message, None
    return "equal", "", None


def _count(where: Array) -> str:
    return f"{int(where.sum())} of {where.size} elements"


def _first(where: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(where)), where.shape))
