"""The criterion for three arrays: a result, a trusted result of the same precision, and a float64 oracle.

In 16 bits, the rounding of the result hides errors of up to half a unit, 2**-9 in bfloat16. Roundings cancel in an
average and systematic errors do not, so the criterion is applied a second time, to averages over parts of the array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..results.findings import TensorVerdict, Verdict
from ..results.precision import Precision, WorstElement
from ..results.report import ParityError
from ..samples.calls import to_numpy
from ..sides.dtypes import DTYPES, is_float, unit_of, wide
from ..sides.subject import Array
from .criterion import decide
from .measures import FLOOR_ULPS, GROUP_FACTOR, Measure, flushed_below, measure, scale_of, sum_floor

FEW = 64
"""Elements below which chance decides: `trusted` may be exact by luck, as a single group of `compare` may."""

PARTS = 4
"""Parts that are averaged. Their roundings are drawn again in each, so that all of `trusted` cancelling is unlikely."""

SHORT = ("bfloat16", "float16")

NOISE_FACTOR = 3.0
"""Standard errors that an average may be off by."""

BIAS_FLOOR = 2.0**-17
"""Part of an average that it may be off by in one direction: float32 loses that in sums of thousands of numbers."""

LEAST_ROWS = 16
"""Rows per part below which their noise can't be measured."""


def as_precise(got: object, trusted: object, oracle: object, *, terms: int = 1) -> Precision:
    """Judge whether an array is as precise as a trusted one, by the criterion of `compare`; NumPy alone is needed.

    With an error being the distance from the oracle, and the floor half a unit in the last place of the oracle's
    largest value::

        rms(error of got) <= 3 rms(error of trusted) + floor
        max|error of got| <= 5 max|error of trusted| + floor

    In bfloat16 and float16, averages over parts of the array must fulfil both, too: an average shows a systematic error
    that is smaller than the rounding of each element.

    Args:
        got: the array to judge, such as a kernel's result: float32, bfloat16, float16 or float64; NumPy's, torch's,
            JAX's, or anything with ``__array__`` or ``__dlpack__``.
        trusted: a result of the same dtype and shape that rounds as it should, such as the plain formula's.
        oracle: the exact result in float64, from the inputs as they were rounded for the others.
        terms: how many numbers an element is the sum of. In float32 the floor grows with their square root, as that of
            a parameter's gradient does in `compare`, so that long sums may be added in any order.

    Raises:
        TypeError: an argument is not an array of floating-point numbers.
        ValueError: the shapes or the dtypes of `got` and `trusted` differ, or the oracle is not float64.
    """
    if isinstance(terms, bool) or not isinstance(terms, int) or terms < 1:
        raise ValueError(f"terms ({terms}) must be a whole number from 1")
    with np.errstate(all="ignore"):
        return _judged(*_arrays(got, trusted, oracle), terms)


def assert_as_precise(got: object, trusted: object, oracle: object, *, terms: int = 1) -> None:
    """Check that an array is as precise as a trusted one; see `as_precise`.

    Args:
        got: the array to judge.
        trusted: a result of the same dtype and shape that rounds as it should.
        oracle: the exact result in float64.
        terms: how many numbers an element is the sum of.

    Raises:
        ParityError: (an AssertionError) it is not; the message has the verdict, the share of the allowed error, the
            index of the worst element and its three values.
        TypeError: see `as_precise`.
        ValueError: see `as_precise`.
    """
    __tracebackhide__ = True  # pytest shows the line of the test that calls this
    result = as_precise(got, trusted, oracle, terms=terms)
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
    array = to_numpy(value)
    if not isinstance(array, np.ndarray) and hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        array = np.from_dlpack(value)
    if not hasattr(array, "__array__"):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    array = np.asarray(array)
    if not is_float(array):
        raise TypeError(f"{name} ({array.dtype.name}) must hold floating-point numbers")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _judged(got: Array, trusted: Array, oracle: Array, terms: int) -> Precision:
    dtype, arrays = got.dtype.name, (wide(got), wide(trusted), oracle)
    measured = _measured((got, trusted, oracle, oracle), dtype)
    more = sum_floor(dtype, terms) if dtype not in SHORT else 0.0
    base = _decided(measured, dtype, more)
    # A result with smaller errors than those of `trusted` may differ from it in any way.
    bias = _bias(arrays, dtype) if dtype in SHORT and measured.first_square > measured.second_square else None
    verdict, message, index = _verdict(base, measured, arrays, bias)
    index = measured.rounded.index if index is None and measured.rounded is not None else index
    share = max(base.first_used or 0.0, bias or 0.0)
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


def _measured(arrays: Sequence[Array], dtype: str) -> Measure:
    """Return the measure of two results and their oracles, without meaning: `got` has no run in float64."""
    got, trusted, oracle, other = arrays
    measured = measure(got, trusted, oracle, other, kind_scale=0.0, dtype=dtype, group=0, weights="held", sample=0)
    return dataclasses.replace(measured, meaning=None)


def _decided(measured: Measure, dtype: str, noise: float = 0.0) -> TensorVerdict:
    return decide("got", "trusted", "output", (), dtype, [measured], noise=noise, sides=("first",))


def _verdict(
    base: TensorVerdict, measured: Measure, arrays: tuple[Array, Array, Array], bias: float | None
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
    if (bias or 0.0) > 1.0:
        return "precision", "its averages are further from the oracle's than rounding takes them", None
    return "equal", "", None


def _count(where: Array) -> str:
    return f"{int(where.sum())} of {where.size} elements"


def _first(where: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(where)), where.shape))


def _bias(arrays: Sequence[Array], dtype: str) -> float | None:
    """Return the share of the allowance that the averages of `got` take; None where their noise can't be measured.

    An average is the sum of the numbers, each by the sign of the oracle's, over that of the oracle. Of `got`, its error
    is the distance from the average of `trusted`, which rounds most elements alike. The error of `trusted` counts by
    the share of the elements that differ: in the others, both have it.
    """
    finite = np.logical_and.reduce([np.isfinite(each) for each in arrays])
    signs = np.sign(np.where(finite, arrays[2], 0.0))
    signed = [np.where(finite, each, 0.0) * signs for each in arrays]
    shape = signs.shape[:-1] if signs.ndim > 1 else signs.shape
    rows = [each.reshape(math.prod(shape), -1).sum(axis=1) for each in signed]
    parts = np.array_split(np.random.default_rng(0).permutation(math.prod(shape)), PARTS)
    ours, theirs, truth = (np.array([each[part].sum() for part in parts]) for each in rows)
    if min(map(len, parts)) < LEAST_ROWS or not (truth > 0.0).all():
        return None
    # Errors may be shared along a row (the denominator of a softmax), or by equal numbers (those of bfloat16 inputs).
    _, which = np.unique(signed[2], return_inverse=True)
    values = [np.bincount(which.reshape(-1), each.reshape(-1)) for each in signed]
    error = max(_standard_error(*rows) * math.sqrt(PARTS), _standard_error(*values))
    noise = (NOISE_FACTOR * error + BIAS_FLOOR) / unit_of(dtype) - FLOOR_ULPS
    reference = theirs / truth
    moved = 1.0 + float(np.mean(signed[0] != signed[1])) * (reference - 1.0)
    averages = _measured((ours / truth, moved, reference, np.ones(PARTS)), dtype)
    return _decided(averages, dtype, noise).first_used


def _standard_error(got: Array, trusted: Array, oracle: Array) -> float:
    """Return the standard error of the difference of two averages, from their independent summands."""
    apart = got - trusted
    around = apart - oracle * (apart.sum() / oracle.sum())
    return math.sqrt(float(np.square(around).sum())) / float(oracle.sum())
