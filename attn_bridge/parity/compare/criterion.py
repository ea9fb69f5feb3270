"""The rule that says whether two sides compute the same, from samples to a verdict; docs/parity.md explains it.

Meaning: in float64 the two agree to `MEANING_LIMIT` of the largest value of their kind.

Precision: the error of a side, its distance from its own float64 result, may be a few times that of the other one:

    rms(error) <= 3 rms(error of the other) + floor    and    max|error| <= 5 max|error of the other| + floor

The floor is half a unit in the last place of the tensor's largest value; what is zero in exact arithmetic is measured
by the largest value of its kind (output, gradients of inputs, of matrices, of vectors).

Samples come in groups, one draw and copies of it moved by a thousandth. Precision is pooled with every group counting
the same: within one group a single ill-conditioned row can carry all of the error of a tensor, and whether its
roundings cancel is luck that the copies redraw. Arrays are not kept.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from .report import Side, TensorVerdict, Verdict, Worst
from .subject import Array

MEANING_LIMIT = 1e-12
RMS_LIMIT = 3.0
MAX_LIMIT = 5.0
FLOOR_ULPS = 0.5

GROUP_FACTOR = 4.0
"""A single group may be this many times further off than all groups together: it holds only a few roundings."""

ROUNDING_FACTOR = 100.0
"""Float64 results may differ by this many times what their rounding errors in low precision foretell."""

ROWS_TOGETHER = {"bfloat16": 1, "float16": 1, "float32": 4}
"""Rows that any library adds up with errors below the floor: measured in float32, where small products of 20,000 rows
are 6 units off in torch and 0.7 in XLA, larger ones of 2,048 rows 0.4 in torch and 1.9 in XLA (CPU, rms)."""

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
        beyond: number of elements whose float64 results differ in meaning.
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
    beyond: int
    worst: Worst
    is_zero: bool = False
    stress: bool = False


def unit_of(dtype: str) -> float:
    """Return the distance from 1 to the next larger number of a dtype, bfloat16 included."""
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]  # ml_dtypes ships no types for it


def scale_of(arrays: Sequence[Array]) -> float:
    """Return the largest finite absolute value."""
    return max((_largest(array) for array in arrays if array.dtype.kind in "fV" and array.size), default=0.0)


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
    if torch.shape != flax.shape:
        raise ValueError(f"arrays to be measured must have one shape, got {torch.shape} and {flax.shape}")
    arrays = [None if one is None else one.reshape(-1) for one in (torch, flax, torch_oracle, flax_oracle)]
    truths = [one for one in (torch_oracle, flax_oracle) if one is not None] or [torch]
    own_scale = max(map(_largest, truths))
    meaning_scale = max(kind_scale, own_scale)
    scale = own_scale if own_scale > 1e-6 * meaning_scale else meaning_scale
    tally = _Tally(meaning_scale)
    for start in range(0, max(torch.size, 1), CHUNK):
        tally.add(start, [None if one is None else _chunk(one, start) for one in arrays])
    atom = unit_of(dtype) * scale
    size = max(torch.size, 1)
    meaning = _part(tally.apart, meaning_scale) if len(truths) == 2 else None
    errors = [_part(largest, atom) for largest in tally.largest]
    meant = meaning is not None and meaning > _allowed_meaning(errors, scale, meaning_scale, dtype)
    place = tally.apart_at if meant else tally.error_at
    values = (torch_oracle, flax_oracle) if meant else (torch, flax)
    oracle = None if torch_oracle is None and flax_oracle is None else truths[0]
    return Measure(
        group=group,
        weights=weights,
        count=torch.size,
        scale=scale,
        meaning=meaning,
        meaning_scale=meaning_scale,
        torch_square=_part(math.sqrt(tally.squares[0] / size), atom) ** 2,
        flax_square=_part(math.sqrt(tally.squares[1] / size), atom) ** 2,
        torch_max=errors[0],
        flax_max=errors[1],
        finite=tally.finite,
        mismatched=tally.mismatched,
        beyond=tally.beyond,
        worst=_worst(sample, tally.mismatch_at if tally.mismatched else place, values, oracle, torch.shape),
        is_zero=own_scale <= ZERO * meaning_scale,
        stress=stress,
    )


CHUNK = 1 << 16
"""Elements that are measured at a time: few enough to stay in the processor's cache."""


class _Tally:
    """Sums up one tensor, piece by piece."""

    def __init__(self, meaning_scale: float):
        self.limit = MEANING_LIMIT * meaning_scale
        self.apart = -1.0
        self.apart_at = self.error_at = self.mismatch_at = 0
        self.squares, self.largest = [0.0, 0.0], [0.0, 0.0]
        self.finite = self.mismatched = self.beyond = 0
        self._error = -1.0

    def add(self, start: int, pieces: Sequence[Array | None]) -> None:
        """Add a piece: both sides' results and both float64 results, flat."""
        torch, flax, torch_oracle, flax_oracle = pieces
        assert torch is not None
        assert flax is not None
        known = [piece for piece in pieces if piece is not None]
        finite: Array | None = None
        if not all(np.isfinite(piece.sum()) or np.isfinite(piece).all() for piece in known):
            finite = np.logical_and.reduce([np.isfinite(piece) for piece in known])
            pairs = [(torch, flax)] + (
                [(torch_oracle, flax_oracle)] if torch_oracle is not None and flax_oracle is not None else []
            )
            for one, two in pairs:
                unlike = ~(np.isfinite(one) & np.isfinite(two) | (np.isnan(one) & np.isnan(two)) | (one == two))
                if unlike.any() and not self.mismatched:
                    self.mismatch_at = start + int(np.argmax(unlike))
                self.mismatched += int(unlike.sum())
        self.finite += torch.size if finite is None else int(finite.sum())
        if not torch.size:
            self.apart = max(self.apart, 0.0)
            return
        if torch_oracle is not None and flax_oracle is not None:
            apart = _apart(torch_oracle, flax_oracle, finite)
            top = int(np.argmax(apart))
            if apart[top] > self.apart:
                self.apart, self.apart_at = float(apart[top]), start + top
            if apart[top] > self.limit:
                self.beyond += int((apart > self.limit).sum())
        truths = (
            torch_oracle if torch_oracle is not None else flax_oracle if flax_oracle is not None else torch,
            flax_oracle if flax_oracle is not None else torch_oracle if torch_oracle is not None else torch,
        )
        for side, (one, truth) in enumerate(zip((torch, flax), truths, strict=True)):
            error = _apart(one, truth, finite)
            top = int(np.argmax(error))
            self.squares[side] += float(np.square(error).sum())
            self.largest[side] = max(self.largest[side], float(error[top]))
            if error[top] > self._error:
                self._error, self.error_at = float(error[top]), start + top


def _chunk(array: Array, start: int) -> Array:
    piece = array[start : start + CHUNK]
    return piece if piece.dtype == np.float64 else piece.astype(np.float64)


def _largest(array: Array) -> float:
    """Return the largest finite absolute value."""
    flat = array.reshape(-1)
    largest = 0.0
    for start in range(0, flat.size, CHUNK):
        piece = np.abs(flat[start : start + CHUNK].astype(np.float64, copy=False))
        top = float(piece.max(initial=0.0))
        if not math.isfinite(top):
            top = float(piece[np.isfinite(piece)].max(initial=0.0))
        largest = max(largest, top)
    return largest


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
    sides: Sequence[Side] = ("torch", "flax"),
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
        sides: the sides whose precision is judged; the other one is what they are judged by.
    """
    allowed = [_allowed_meaning((one.torch_max, one.flax_max), one.scale, one.meaning_scale, dtype) for one in measures]
    shares = [(one.meaning or 0.0) / limit for one, limit in zip(measures, allowed, strict=True)]
    plain = [one for one in measures if not one.stress]
    torch_used, flax_used = precision_used(plain, noise)
    judged = [used for side, used in (("torch", torch_used), ("flax", flax_used)) if side in sides]
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
        return _with(base, "different", one, message, bad=sum(one.beyond for one in measures))
    if max(judged, default=0.0) > 1.0 and furthest is not None:
        one = furthest
        side: Side = "torch" if torch_used > flax_used or "flax" not in sides else "flax"
        mine, other = (base.torch_ulps, base.flax_ulps) if side == "torch" else (base.flax_ulps, base.torch_ulps)
        verdict: Verdict = "precision"
        message = (
            f"{side} loses more than its share: its rounding error is {mine:.3g} ulps, the other side's {other:.3g}"
            f"{_at(one.worst, one.weights)}"
        )
        if not known and max(judged) > 100.0:
            verdict, side_or_none = "different", None
            message = f"the results differ by far more than rounding{_at(one.worst, one.weights)}"
        else:
            side_or_none = side
        return dataclasses.replace(_with(base, verdict, one, message), side=side_or_none)
    return dataclasses.replace(base, worst=None if furthest is None else furthest.worst)


def agree(torch: Array, flax: Array, dtype: str, kind_scale: float, known: Sequence[Measure]) -> bool:
    """Tell whether two results are about as close as their rounding errors in other samples say they should be."""
    own_scale = _largest(torch)
    scale = own_scale if own_scale > 1e-6 * kind_scale else kind_scale
    allowed = GROUP_FACTOR * max(one.torch_max + one.flax_max for one in known) + FLOOR_ULPS
    limit = allowed * unit_of(dtype) * scale
    torch, flax = torch.reshape(-1), flax.reshape(-1)
    for start in range(0, torch.size, CHUNK):
        if not float(np.abs(_chunk(torch, start) - _chunk(flax, start)).max(initial=0.0)) <= limit:
            return False  # so it is where one of them is not finite
    return True


def with_error(one: Measure, side: Side, plain: Array, redrawn: Array, dtype: str) -> Measure:
    """Return the measure with at least the error that the side makes when its roundings are drawn again."""
    atom = unit_of(dtype) * one.scale
    finite = np.isfinite(plain) & np.isfinite(redrawn)
    error = np.abs(np.where(finite, redrawn, 0.0) - np.where(finite, plain, 0.0))
    square = _part(math.sqrt(float(np.square(error).mean())) if error.size else 0.0, atom) ** 2
    largest = _part(float(error.max(initial=0.0)), atom)
    if side == "torch":
        return dataclasses.replace(
            one, torch_square=max(one.torch_square, square), torch_max=max(one.torch_max, largest)
        )
    return dataclasses.replace(one, flax_square=max(one.flax_square, square), flax_max=max(one.flax_max, largest))


def sum_floor(dtype: str, rows: int) -> float:
    """Return what is allowed beyond the floor, in units of the last place, to a tensor that is a sum over rows.

    The rounding errors of a sum that is taken one row after the other grow with the square root of the rows; which
    libraries do so for which shapes is no fault. In 16 bits each row may be rounded, in 32 bits a block of rows.
    """
    together = ROWS_TOGETHER.get(dtype)
    return FLOOR_ULPS * (math.sqrt(max(rows / together, 1.0)) - 1.0) if together else 0.0


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


def _allowed_meaning(errors: Sequence[float], scale: float, meaning_scale: float, dtype: str) -> float:
    """Return the float64 difference that rounding alone may make, as a part of the scale of the kind.

    Rounding errors in low precision show how ill-conditioned the tensor is; in float64 they shrink with the unit. Those
    of the worse side count: if it is the only bad one (a variance that cancels), that is a fault of precision.
    """
    unit = float(np.finfo(np.float64).eps)
    error = max(errors) * (scale / meaning_scale if meaning_scale else 1.0)
    return max(MEANING_LIMIT, ROUNDING_FACTOR * error * unit if math.isfinite(error) and dtype != "float64" else 0.0)


def _with(base: TensorVerdict, verdict: Verdict, one: Measure, message: str, bad: int = 0) -> TensorVerdict:
    return dataclasses.replace(base, verdict=verdict, message=message, weights=one.weights, worst=one.worst, bad=bad)


def _at(worst: Worst, weights: str) -> str:
    index = "" if not worst.index else f" at {worst.index}"
    return f"; worst{index}: torch {worst.torch:.9g}, flax {worst.flax:.9g} ({weights} weights)"


def _apart(one: Array, two: Array, finite: Array | None) -> Array:
    if finite is not None:
        one, two = np.where(finite, one, 0.0), np.where(finite, two, 0.0)
    difference = np.subtract(one, two)
    np.abs(difference, out=difference)
    return difference


def _worst(
    sample: int, place: int, values: Sequence[Array | None], oracle: Array | None, shape: tuple[int, ...]
) -> Worst:
    if not math.prod(shape):
        return Worst(sample, (), math.nan, math.nan, None)
    index = tuple(int(i) for i in np.unravel_index(place, shape))
    one, two = (float(value[index]) if value is not None else math.nan for value in values)
    return Worst(sample, index, one, two, None if oracle is None else float(oracle[index]))


def _part(value: float, whole: float) -> float:
    return 0.0 if value == 0.0 else value / whole if whole else math.inf


def _rms(squares: Sequence[float]) -> float:
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _share(value: float, allowed: float) -> float:
    return 0.0 if value == 0.0 else value / allowed if allowed else math.inf
