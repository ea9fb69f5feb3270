"""From arrays to a verdict: what each sample says about a tensor, and what all samples say together.

The rule is that of `judge`; here it is applied to any number of samples without keeping their arrays. Each side's
rounding error is the distance from its own float64 result, so that a difference in meaning and a loss of precision
are told apart. Samples come in groups (one draw and its slightly moved copies). Precision is pooled with every group
counting the same, because within one group a single ill-conditioned row can carry all of the error of a tensor, and
whether its roundings cancel is luck.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from .comparison import Side, TensorVerdict, Verdict, Worst
from .judge import FLOOR_ULPS, MAX_LIMIT, MEANING_LIMIT, RMS_LIMIT
from .subjects import Array

GROUP_FACTOR = 4.0
"""A single group may be this many times further off than all groups together: it holds only a few roundings."""

ROUNDING_FACTOR = 100.0
"""Float64 results may differ by this many times what their rounding errors in low precision foretell."""

ZERO = 1e-13
"""A gradient below this part of the largest of its kind is zero in exact arithmetic."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """What one sample says about one tensor; errors are in units of the last place of `scale`.

    Attributes:
        group: samples of one group differ by tiny moves only.
        weights: ``held`` or ``own``.
        count: number of elements.
        scale: largest absolute value that the tensor is judged by.
        meaning: largest difference of the two float64 results, as a part of `meaning_scale`; None without float64.
        meaning_scale: largest absolute value among tensors of the kind.
        torch_square: mean square of the torch side's error.
        flax_square: mean square of the Flax side's error.
        torch_max: largest error of the torch side.
        flax_max: largest error of the Flax side.
        finite: number of elements that are finite on both sides.
        mismatched: number of elements that are finite on one side only, or infinite with another sign.
        worst: the element that is furthest off, by meaning if that is known, else by precision.
        is_zero: whether both float64 results are zero but for rounding.
        stress: whether the inputs were drawn to be hard; such a sample speaks about the meaning alone.
    """

    group: int
    weights: str
    count: int
    scale: float
    meaning: float | None
    meaning_scale: float
    torch_square: float
    flax_square: float
    torch_max: float
    flax_max: float
    finite: int
    mismatched: int
    worst: Worst
    is_zero: bool = False
    stress: bool = False


def scale_of(arrays: Sequence[Array]) -> float:
    """Return the largest finite absolute value."""
    largest = 0.0
    for array in arrays:
        if array.size:
            found = np.max(np.abs(array), initial=0.0, where=np.isfinite(array)) if array.dtype.kind == "f" else 0.0
            largest = max(largest, float(found))
    return largest


def measure(
    torch: Array,
    flax: Array,
    torch_oracle: Array | None,
    flax_oracle: Array | None,
    *,
    kind_scale: float,
    dtype: str,
    group: int,
    weights: str,
    sample: int,
    stress: bool = False,
) -> Measure:
    """Measure one tensor of one sample.

    Args:
        torch: the torch side's result in its own precision.
        flax: the Flax side's result in its own precision.
        torch_oracle: the torch side's float64 result; None if it has none.
        flax_oracle: the same of the Flax side.
        kind_scale: largest absolute value among tensors of the kind, in this sample.
        dtype: the precision.
        group: group of the sample.
        weights: ``held`` or ``own``.
        sample: number of the sample.
        stress: whether its inputs were drawn to be hard.
    """
    truth_torch = torch_oracle if torch_oracle is not None else flax_oracle
    truth_flax = flax_oracle if flax_oracle is not None else torch_oracle
    low = [torch.astype(np.float64), flax.astype(np.float64)]
    if truth_torch is None or truth_flax is None:
        truth_torch = truth_flax = low[0]
    truths = [truth_torch, truth_flax]
    own_scale = scale_of(truths)
    meaning_scale = max(kind_scale, own_scale)
    scale = own_scale if own_scale > 1e-6 * meaning_scale else meaning_scale
    atom = float(ml_dtypes.finfo(dtype).eps) * scale  # type: ignore[no-untyped-call]
    finite = np.isfinite(low[0]) & np.isfinite(low[1]) & np.isfinite(truths[0]) & np.isfinite(truths[1])
    all_finite = bool(finite.all())
    mismatched = 0 if all_finite else _mismatched(truths[0], truths[1]) + _mismatched(low[0], low[1])
    meaning, difference = None, None
    if torch_oracle is not None and flax_oracle is not None:
        difference = _apart(torch_oracle, flax_oracle, finite, all_finite)
        meaning = _part(float(difference.max(initial=0.0)), meaning_scale)
    errors = [_apart(one, truth, finite, all_finite) for one, truth in zip(low, truths, strict=True)]
    squares = [_part(float(np.sqrt(np.mean(error * error))) if error.size else 0.0, atom) ** 2 for error in errors]
    largest = [_part(float(error.max(initial=0.0)), atom) for error in errors]
    meant = meaning is not None and meaning > MEANING_LIMIT
    furthest = difference if meant and difference is not None else max(errors, key=lambda one: one.max(initial=0.0))
    return Measure(
        group=group,
        weights=weights,
        count=torch.size,
        scale=scale,
        meaning=meaning,
        meaning_scale=meaning_scale,
        torch_square=squares[0],
        flax_square=squares[1],
        torch_max=largest[0],
        flax_max=largest[1],
        finite=int(finite.sum()) if not all_finite else torch.size,
        mismatched=mismatched,
        worst=_worst(sample, furthest, truths if meant else low, None if meant else truths[0]),
        is_zero=own_scale <= ZERO * meaning_scale,
        stress=stress,
    )


def decide(
    name: str,
    flax_name: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: str,
    measures: Sequence[Measure],
    *,
    mode: str = "eager",
    noise: float = 0.0,
) -> TensorVerdict:
    """Return the verdict on a tensor from all its samples.

    Args:
        name: torch name.
        flax_name: Flax name.
        kind: kind of tensor.
        shape: torch shape.
        dtype: precision of the runs.
        measures: one per sample.
        mode: mode of the runs.
        noise: how much the sides differ from themselves, in units of the last place; added to what is allowed.
    """
    allowed = [_allowed_meaning(one, dtype) for one in measures]
    shares = [(one.meaning or 0.0) / limit for one, limit in zip(measures, allowed, strict=True)]
    plain = [one for one in measures if not one.stress]
    torch_used, flax_used = precision_used(plain, noise)
    meaning_used = max(shares, default=0.0)
    by_meaning = int(np.argmax(shares)) if shares else 0
    furthest = max(plain, key=lambda one: max(one.torch_max, one.flax_max), default=None)
    known = [one.meaning for one in measures if one.meaning is not None]
    base = TensorVerdict(
        name=name,
        flax_name=flax_name,
        kind=kind,
        shape=shape,
        dtype=dtype,
        verdict="equal",
        mode=mode,
        relative=max(known) if known else None,
        meaning_used=meaning_used if known else None,
        torch_used=torch_used,
        flax_used=flax_used,
        torch_ulps=_rms([one.torch_square for one in plain]),
        flax_ulps=_rms([one.flax_square for one in plain]),
        count=sum(one.count for one in measures),
    )
    bad = [one for one in measures if one.mismatched]
    if bad:
        count = sum(one.mismatched for one in bad)
        message = f"{count} elements are finite on one side only{_at(bad[0].worst, bad[0].weights)}"
        return _with(base, "different", bad[0], message, bad=count)
    if not any(one.finite for one in measures) and base.count:
        return _with(base, "inconclusive", measures[0], "no element is finite on both sides, so nothing was compared")
    if meaning_used > 1.0:
        one = measures[by_meaning]
        message = (
            f"float64 results differ by {one.meaning:.2g} of the largest value, allowed {allowed[by_meaning]:.1g}"
            f"{_at(one.worst, one.weights)}"
        )
        return _with(base, "different", one, message)
    if max(torch_used, flax_used) > 1.0 and furthest is not None:
        one = furthest
        side: Side = "torch" if torch_used > flax_used else "flax"
        mine, other = (base.torch_ulps, base.flax_ulps) if side == "torch" else (base.flax_ulps, base.torch_ulps)
        verdict: Verdict = "precision"
        message = (
            f"{side} loses more than its share: its rounding error is {mine:.3g} ulps, the other side's {other:.3g}"
            f"{_at(one.worst, one.weights)}"
        )
        if not known and max(torch_used, flax_used) > 100.0:
            verdict, side_or_none = "different", None
            message = f"the results differ by far more than rounding{_at(one.worst, one.weights)}"
        else:
            side_or_none = side
        return dataclasses.replace(_with(base, verdict, one, message), side=side_or_none)
    return dataclasses.replace(base, worst=None if furthest is None else furthest.worst)


def precision_used(measures: Sequence[Measure], noise: float = 0.0) -> tuple[float, float]:
    """Return the shares of the precision allowance that the torch and the Flax side took."""
    groups = collections.defaultdict(list)
    for one in measures:
        groups[one.group, one.weights].append(one)
    floor = FLOOR_ULPS + noise
    shares = []
    for mine, other in (("torch", "flax"), ("flax", "torch")):
        normal, largest, other_normal, other_largest, single, floors = [], [], [], [], 0.0, []
        for group in groups.values():
            square = float(np.mean([getattr(one, f"{mine}_square") for one in group]))
            other_square = float(np.mean([getattr(one, f"{other}_square") for one in group]))
            top = max(getattr(one, f"{mine}_max") for one in group)
            other_top = max(getattr(one, f"{other}_max") for one in group)
            size = math.sqrt(square + other_square) or 1.0
            top_size = max(top, other_top) or 1.0
            normal.append(square / size**2)
            other_normal.append(other_square / size**2)
            largest.append(top / top_size)
            other_largest.append(other_top / top_size)
            floors.append((floor / size, floor / top_size))
            allowed = GROUP_FACTOR * (RMS_LIMIT * math.sqrt(other_square) + floor)
            single = max(single, math.sqrt(square) / allowed)
        pooled_floor, top_floor = (float(np.mean(column)) for column in zip(*floors, strict=True)) if floors else (1, 1)
        rms = _share(_rms(normal), RMS_LIMIT * _rms(other_normal) + pooled_floor)
        top = _share(_rms([x * x for x in largest]), MAX_LIMIT * _rms([x * x for x in other_largest]) + top_floor)
        shares.append(max(rms, top, single))
    return shares[0], shares[1]


def _allowed_meaning(one: Measure, dtype: str) -> float:
    """Return the float64 difference that rounding alone may make, as a part of the scale of the kind.

    Rounding errors in low precision show how ill-conditioned the tensor is; in float64 they shrink with the unit.
    """
    unit = float(np.finfo(np.float64).eps)
    error = min(one.torch_max, one.flax_max) * (one.scale / one.meaning_scale if one.meaning_scale else 1.0)
    return max(MEANING_LIMIT, ROUNDING_FACTOR * error * unit if math.isfinite(error) and dtype != "float64" else 0.0)


def _with(base: TensorVerdict, verdict: Verdict, one: Measure, message: str, bad: int = 0) -> TensorVerdict:
    return dataclasses.replace(base, verdict=verdict, message=message, weights=one.weights, worst=one.worst, bad=bad)


def _at(worst: Worst, weights: str) -> str:
    index = "" if not worst.index else f" at {worst.index}"
    return f"; worst{index}: torch {worst.torch:.9g}, flax {worst.flax:.9g} ({weights} weights)"


def _apart(one: Array, two: Array, finite: Array, all_finite: bool) -> Array:
    difference = (
        np.subtract(one, two, dtype=np.float64)
        if all_finite
        else np.where(
            finite, np.subtract(np.where(finite, one, 0.0), np.where(finite, two, 0.0), dtype=np.float64), 0.0
        )
    )
    return np.abs(difference, out=difference) if difference.ndim else np.abs(difference)


def _mismatched(one: Array, two: Array) -> int:
    """Count where one is finite and the other is not, or the two are different infinities."""
    same = np.isfinite(one) & np.isfinite(two) | (np.isnan(one) & np.isnan(two)) | (one == two)
    return int((~same).sum())


def _worst(sample: int, error: Array, values: Sequence[Array], oracle: Array | None) -> Worst:
    if not error.size:
        return Worst(sample, (), math.nan, math.nan, None)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    return Worst(
        sample,
        index,
        float(values[0][index]),
        float(values[1][index]),
        None if oracle is None else float(oracle[index]),
    )


def _part(value: float, whole: float) -> float:
    return 0.0 if value == 0.0 else value / whole if whole else math.inf


def _rms(squares: Sequence[float]) -> float:
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _share(value: float, allowed: float) -> float:
    return 0.0 if value == 0.0 else value / allowed if allowed else math.inf
