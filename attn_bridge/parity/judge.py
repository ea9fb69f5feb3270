"""The rule: what makes two tensors equal in meaning, and what makes a low-precision one precise enough.

Meaning: in float64 the two agree to `MEANING_LIMIT` of the largest value of their kind.

Precision: with the other framework's float64 result R, the candidate's error ``C - R`` may be a few times the error
``T - R`` that the other framework makes itself in the same precision:

    rms(C - R) <= 3 rms(T - R) + floor    and    max|C - R| <= 5 max|T - R| + floor

The floor is half a unit in the last place of the largest value of the kind (output, attention weights, gradients of
inputs, weights, biases), so that a tensor that is zero in exact arithmetic is judged by rounding alone. In 16 bits
a parameter's gradient is a sum over rows that may be rounded after every addition; its floor grows with the square
root of the rows.

Errors are pooled over samples first: several seeds, and for each of them several copies of its numbers, moved by a
thousandth. One large row can dominate the error of a small tensor, and whether its roundings cancel is luck that a
single sample cannot tell from precision; the copies keep the row and redraw the luck.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

MEANING_LIMIT = 1e-12
RMS_LIMIT = 3.0
MAX_LIMIT = 5.0
FLOOR_ULPS = 0.5


@dataclasses.dataclass(frozen=True)
class TensorResult:
    """Judgement of one tensor, pooled over samples.

    Attributes:
        name: ``output``, ``weights``, ``grad x``, ``grad W_query.weight`` ...
        used: share of the allowance that was used; above 1 is a mismatch.
        relative: largest difference, relative to the largest value of the kind.
        sample: which sample holds the worst element.
        index: its index.
        got: its value.
        expected: the value it was judged against.
        allowed: the largest difference that would have passed there.
        bad: how many elements are beyond `allowed`, over all samples.
        count: number of elements over all samples.
    """

    name: str
    used: float
    relative: float
    sample: int
    index: tuple[int, ...]
    got: float
    expected: float
    allowed: float
    bad: int
    count: int

    @property
    def passed(self) -> bool:
        """Whether the tensor is within its allowance."""
        return self.used <= 1.0

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.bad} of {self.count} elements beyond {self.allowed:.3g}; worst at {self.index} of "
            f"sample {self.sample}: got {self.got:.9g}, expected {self.expected:.9g}; {self.used:.3g} x the allowance"
        )


def judge_meaning(name: str, got: Sequence[Array], expected: Sequence[Array], scales: Sequence[float]) -> TensorResult:
    """Judge two float64 results for the same meaning.

    Args:
        name: name of the tensor.
        got: one array per sample.
        expected: the other framework's (or the reference's) arrays.
        scales: per sample, the largest absolute value among tensors of this kind.
    """
    errors = [_difference(one, two) for one, two in zip(got, expected, strict=True)]
    allowed = [MEANING_LIMIT * scale for scale in scales]
    return _worst(name, got, expected, errors, allowed, scales, _share(errors, allowed))


def judge_precision(
    name: str,
    candidate: Sequence[Array],
    trusted: Sequence[Array],
    oracle: Sequence[Array],
    scales: Sequence[float],
    dtype: str,
    *,
    rows: int = 1,
) -> TensorResult:
    """Judge a low-precision result against a float64 one, by the error another framework makes in that precision.

    Args:
        name: name of the tensor.
        candidate: one array per sample.
        trusted: the other framework's arrays in the same precision.
        oracle: the other framework's float64 arrays.
        scales: per sample, the largest absolute value among tensors of this kind.
        dtype: name of the precision.
        rows: number of rows that the tensor is a sum over, for a parameter's gradient.
    """
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]  # ml_dtypes ships no types for it
    growth = np.sqrt(rows) if info.bits == 16 else 1.0
    atoms = [float(info.eps) * scale for scale in scales]
    errors = [_difference(one, truth) for one, truth in zip(candidate, oracle, strict=True)]
    own = [_difference(one, truth) for one, truth in zip(trusted, oracle, strict=True)]
    # In units of the last place, so that samples of different size pool.
    units = np.concatenate([_in_units(error, atom) for error, atom in zip(errors, atoms, strict=True)])
    own_units = np.concatenate([_in_units(error, atom) for error, atom in zip(own, atoms, strict=True)])
    floor = FLOOR_ULPS * growth
    rms_allowed = RMS_LIMIT * _rms(own_units) + floor
    max_allowed = MAX_LIMIT * float(own_units.max(initial=0.0)) + floor
    used = max(_rms(units) / rms_allowed, float(units.max(initial=0.0)) / max_allowed)
    return _worst(name, candidate, oracle, errors, [max_allowed * atom for atom in atoms], scales, used)


def _difference(one: Array, two: Array) -> Array:
    """Return absolute differences; where either is not finite, 0 if both are the same there, else infinity."""
    if one.shape != two.shape:
        return np.full(one.shape, np.inf)
    one, two = one.astype(np.float64), two.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(two)
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        return np.where(finite, np.abs(one - two), np.where(same, 0.0, np.inf))


def _in_units(error: Array, atom: float) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        units = np.where(error == 0.0, 0.0, error / atom)
    return np.asarray(units, dtype=np.float64).ravel()


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values * values))) if values.size else 0.0


def _share(errors: Sequence[Array], allowed: Sequence[float]) -> float:
    shares = [_in_units(error, limit).max(initial=0.0) for error, limit in zip(errors, allowed, strict=True)]
    return float(max(shares, default=0.0))


def _worst(
    name: str,
    got: Sequence[Array],
    expected: Sequence[Array],
    errors: Sequence[Array],
    allowed: Sequence[float],
    scales: Sequence[float],
    used: float,
) -> TensorResult:
    relative = [float(_in_units(error, scale).max(initial=0.0)) for error, scale in zip(errors, scales, strict=True)]
    sample = int(np.argmax(relative)) if relative else 0
    error = errors[sample]
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape)) if error.size else ()
    comparable = error.size > 0 and got[sample].shape == expected[sample].shape
    return TensorResult(
        name=name,
        used=float("inf") if np.isnan(used) else float(used),
        relative=max(relative, default=0.0),
        sample=sample,
        index=index,
        got=float(got[sample][index]) if comparable else float("nan"),
        expected=float(expected[sample][index]) if comparable else float("nan"),
        allowed=allowed[sample] if allowed else 0.0,
        bad=sum(int((error > limit).sum()) for error, limit in zip(errors, allowed, strict=True)),
        count=sum(error.size for error in errors),
    )
