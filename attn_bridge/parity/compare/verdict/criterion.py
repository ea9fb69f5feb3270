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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..results.findings import Side, TensorVerdict, Verdict, Worst
from ..sides.dtypes import unit_of

Array = np.ndarray[Any, Any]

LABELS: Mapping[Side, str] = {"first": "torch", "second": "flax"}
"""What the sides are called where nothing else is said."""

MEANING_LIMIT = 1e-12
RMS_LIMIT = 3.0
MAX_LIMIT = 5.0
FLOOR_ULPS = 0.5

GROUP_FACTOR = 4.0
"""A single group may be this many times further off than all groups together: it holds only a few roundings."""

ROUNDING_FACTOR = 100.0
"""Float64 results may differ by this many times what their rounding errors in low precision predict."""

ROWS_TOGETHER = {"bfloat16": 1, "float16": 1, "float32": 4}
"""Rows that any library adds up with errors below the floor: measured in float32, where small products of 20,000 rows
are 6 units off in torch and 0.7 in XLA, larger ones of 2,048 rows 0.4 in torch and 1.9 in XLA (CPU, rms)."""

TABLE_FACTOR = 4.0
"""Tables may explain this many times what moving their entries at random by one unit of float32 does: the errors of a
table that is computed in float32 are a few units, and not at random."""

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
        first_square: mean square of the first side's error.
        second_square: mean square of the second side's error.
        first_max: largest error of the first side.
        second_max: largest error of the second side.
        finite: number of elements that are finite on both sides.
        mismatched: number of elements that are finite on one side only, or infinite with another sign.
        beyond: number of elements whose float64 results differ in meaning.
        worst: the element that is furthest off, by meaning if that is known, else by precision.
        is_zero: whether both float64 results are zero but for rounding.
        stress: whether the inputs were drawn to be hard; such a sample speaks about the meaning alone.
        title: the sample as a reader knows it.
        given: what one unit of float32 in tables without parameters does to the float64 results, as a part of
            `meaning_scale`; it is allowed.
        part: largest absolute value of the tensor, as a part of `meaning_scale`.
        is_flushed: whether it is too small for its precision to be judged; see `flushed_below`.
    """

    group: int
    weights: str
    count: int
    scale: float
    meaning: float | None
    meaning_scale: float
    first_square: float
    second_square: float
    first_max: float
    second_max: float
    finite: int
    mismatched: int
    beyond: int
    worst: Worst
    is_zero: bool = False
    stress: bool = False
    title: str = ""
    given: float = 0.0
    part: float = 1.0
    is_flushed: bool = False


def scale_of(arrays: Sequence[Array]) -> float:
    """Return the largest finite absolute value."""
    return max((_largest(array) for array in arrays if array.dtype.kind in "fV" and array.size), default=0.0)


def flushed_below(dtype: str) -> float:
    """Return the size up to which the precision of a tensor is not judged; 0 where every number is kept.

    Processors and compilers may take numbers below the smallest normal one for zero, and do so in the last digits of
    what is not much larger. Nothing computes in float16 without a wider unit behind it, and float64 is far from there.
    """
    if dtype not in ("float32", "bfloat16"):
        return 0.0
    return float(np.finfo(np.float32).tiny) / unit_of(dtype)


def measure(
    first: Array,
    second: Array,
    first_oracle: Array | None,
    second_oracle: Array | None,
    *,
    kind_scale: float,
    dtype: str,
    group: int,
    weights: str,
    sample: int,
    stress: bool = False,
    title: str = "",
) -> Measure:
    """Measure one tensor of one sample.

    Args:
        first: the first side's result in its own precision.
        second: the second side's result in its own precision.
        first_oracle: the first side's float64 result; None if it has none.
        second_oracle: the same of the second side.
        kind_scale: largest absolute value among tensors of the kind, in this sample.
        dtype: the precision.
        group: group of the sample.
        weights: ``held`` or ``own``.
        sample: number of the sample.
        stress: whether its inputs were drawn to be hard.
        title: the sample as a reader knows it.
    """
    if first.shape != second.shape:
        raise ValueError(f"arrays to be measured must have one shape, got {first.shape} and {second.shape}")
    arrays = [None if one is None else one.reshape(-1) for one in (first, second, first_oracle, second_oracle)]
    truths = [one for one in (first_oracle, second_oracle) if one is not None] or [first]
    own_scale = max(map(_largest, truths))
    meaning_scale = max(kind_scale, own_scale)
    scale = own_scale if own_scale > 1e-6 * meaning_scale else meaning_scale
    tally = _Tally(meaning_scale)
    for start in range(0, max(first.size, 1), CHUNK):
        tally.add(start, [None if one is None else _chunk(one, start) for one in arrays])
    is_flushed = 0.0 < max(scale, *tally.largest) <= flushed_below(dtype)
    atom = math.inf if is_flushed else unit_of(dtype) * scale
    size = max(first.size, 1)
    meaning = _part(tally.apart, meaning_scale) if len(truths) == 2 else None
    errors = [_part(largest, atom) for largest in tally.largest]
    meant = meaning is not None and meaning > _allowed_meaning(errors, scale, meaning_scale, dtype)
    place = tally.apart_at if meant else tally.error_at
    values = (first_oracle, second_oracle) if meant else (first, second)
    oracle = None if first_oracle is None and second_oracle is None else truths[0]
    return Measure(
        group=group,
        weights=weights,
        count=first.size,
        scale=scale,
        meaning=meaning,
        meaning_scale=meaning_scale,
        first_square=_part(math.sqrt(tally.squares[0] / size), atom) ** 2,
        second_square=_part(math.sqrt(tally.squares[1] / size), atom) ** 2,
        first_max=errors[0],
        second_max=errors[1],
        finite=tally.finite,
        mismatched=tally.mismatched,
        beyond=tally.beyond,
        worst=_worst(sample, tally.mismatch_at if tally.mismatched else place, values, oracle, first.shape),
        is_zero=own_scale <= ZERO * meaning_scale,
        stress=stress,
        title=title,
        part=_part(own_scale, meaning_scale),
        is_flushed=is_flushed,
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
        first, second, first_oracle, second_oracle = pieces
        assert first is not None
        assert second is not None
        known = [piece for piece in pieces if piece is not None]
        finite: Array | None = None
        if not all(np.isfinite(piece.sum()) or np.isfinite(piece).all() for piece in known):
            finite = np.logical_and.reduce([np.isfinite(piece) for piece in known])
            pairs = [(first, second)] + (
                [(first_oracle, second_oracle)] if first_oracle is not None and second_oracle is not None else []
            )
            overflown = _overflown(pieces)
            for one, two in pairs:
                unlike = ~(np.isfinite(one) & np.isfinite(two) | (np.isnan(one) & np.isnan(two)) | (one == two))
                unlike &= ~overflown
                if unlike.any() and not self.mismatched:
                    self.mismatch_at = start + int(np.argmax(unlike))
                self.mismatched += int(unlike.sum())
        self.finite += first.size if finite is None else int(finite.sum())
        if not first.size:
            self.apart = max(self.apart, 0.0)
            return
        if first_oracle is not None and second_oracle is not None:
            apart = _apart(first_oracle, second_oracle, finite)
            top = int(np.argmax(apart))
            if apart[top] > self.apart:
                self.apart, self.apart_at = float(apart[top]), start + top
            if apart[top] > self.limit:
                self.beyond += int((apart > self.limit).sum())
        truths = (
            first_oracle if first_oracle is not None else second_oracle if second_oracle is not None else first,
            second_oracle if second_oracle is not None else first_oracle if first_oracle is not None else first,
        )
        for side, (one, truth) in enumerate(zip((first, second), truths, strict=True)):
            error = _apart(one, truth, finite)
            top = int(np.argmax(error))
            self.squares[side] += float(np.square(error).sum())
            self.largest[side] = max(self.largest[side], float(error[top]))
            if error[top] > self._error:
                self._error, self.error_at = float(error[top]), start + top


def _overflown(pieces: Sequence[Array | None]) -> Array:
    """Return where both sides overflow, whose float64 results are finite: to NaN or to an infinity of either sign.

    Which of these it is follows from the order of operations, as inf - inf does, and from nothing that is meant.
    """
    first, second, *truths = pieces
    assert first is not None
    assert second is not None
    if any(one is None for one in truths):
        return np.zeros(first.shape, np.bool_)
    found: Array = ~np.isfinite(first) & ~np.isfinite(second)
    for one in truths:
        assert one is not None
        found &= np.isfinite(one)
    return found


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
    second_name: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: str,
    measures: Sequence[Measure],
    *,
    mode: str = "eager",
    noise: float = 0.0,
    sides: Sequence[Side] = ("first", "second"),
    labels: Mapping[Side, str] = LABELS,
) -> TensorVerdict:
    """Return the verdict on a tensor from all its samples.

    Args:
        name: the first side's name.
        second_name: the second side's name.
        kind: kind of tensor.
        shape: the first side's shape.
        dtype: precision of the runs.
        measures: one per sample.
        mode: mode of the runs.
        noise: how much the sides differ from themselves, in units of the last place; added to what is allowed.
        sides: the sides whose precision is judged; the other one is what they are judged by.
        labels: what the sides are called in messages.
    """
    allowed = [allowed_meaning(one, dtype) for one in measures]
    shares = [(one.meaning or 0.0) / limit for one, limit in zip(measures, allowed, strict=True)]
    plain = [one for one in measures if not one.stress]
    first_used, second_used = precision_used(plain, noise)
    judged = [used for side, used in (("first", first_used), ("second", second_used)) if side in sides]
    meaning_used = max(shares, default=0.0)
    by_meaning = int(np.argmax(shares)) if shares else 0
    furthest = max(plain, key=lambda one: max(one.first_max, one.second_max), default=None)
    known = [one.meaning for one in measures if one.meaning is not None]
    base = TensorVerdict(
        name=name,
        second_name=second_name,
        kind=kind,
        shape=shape,
        dtype=dtype,
        verdict="equal",
        mode=mode,
        relative=max(known) if known else None,
        meaning_used=meaning_used if known else None,
        first_used=first_used,
        second_used=second_used,
        first_ulps=_rms([one.first_square for one in plain]),
        second_ulps=_rms([one.second_square for one in plain]),
        count=sum(one.count for one in measures),
    )
    bad = [one for one in measures if one.mismatched]
    if bad:
        count = sum(one.mismatched for one in bad)
        message = f"{count} elements are finite on one side only{_at(bad[0], labels)}"
        return _with(base, "different", bad[0], message, bad=count)
    if not any(one.finite for one in measures) and base.count:
        return _with(base, "inconclusive", measures[0], "no element is finite on both sides, so nothing was compared")
    if meaning_used > 1.0:
        one = measures[by_meaning]
        message = (
            f"float64 results differ by {one.meaning:.2g} of the largest value, allowed {allowed[by_meaning]:.1g}"
            f"{_at(one, labels)}"
        )
        return _with(base, "different", one, message, bad=sum(one.beyond for one in measures))
    if max(judged, default=0.0) > 1.0 and furthest is not None:
        one = furthest
        side: Side = "first" if first_used > second_used or "second" not in sides else "second"
        mine, other = (base.first_ulps, base.second_ulps) if side == "first" else (base.second_ulps, base.first_ulps)
        verdict: Verdict = "precision"
        side_or_none: str | None = None
        message = (
            f"{labels[side]} loses more than its share: its rounding error is {mine:.3g} ulps, "
            f"the other side's {other:.3g}{_at(one, labels)}"
        )
        if not known and max(judged) > 100.0:
            verdict = "different"
            message = f"the results differ by far more than rounding{_at(one, labels)}"
        else:
            side_or_none = labels[side]
        return dataclasses.replace(_with(base, verdict, one, message), side=side_or_none)
    if furthest is None:
        return base
    return dataclasses.replace(base, worst=furthest.worst, sample=furthest.title)


def agree(first: Array, second: Array, dtype: str, kind_scale: float, known: Sequence[Measure]) -> bool:
    """Tell whether two results are about as close as their rounding errors in other samples say they should be."""
    own_scale = _largest(first)
    scale = own_scale if own_scale > 1e-6 * kind_scale else kind_scale
    allowed = GROUP_FACTOR * max(one.first_max + one.second_max for one in known) + FLOOR_ULPS
    limit = allowed * unit_of(dtype) * scale
    first, second = first.reshape(-1), second.reshape(-1)
    for start in range(0, first.size, CHUNK):
        if not float(np.abs(_chunk(first, start) - _chunk(second, start)).max(initial=0.0)) <= limit:
            return False  # so it is where one of them is not finite
    return True


def with_table_error(one: Measure, moved: float) -> Measure:
    """Return the measure allowed what tables in float32 explain: how far moving them by one unit moves the result."""
    return dataclasses.replace(one, given=TABLE_FACTOR * _part(moved, one.meaning_scale))


def with_error(one: Measure, side: Side, rms: float, largest: float, dtype: str) -> Measure:
    """Return the measure with at least the error that a side makes under other roundings: its rms and its largest."""
    atom = math.inf if one.is_flushed else unit_of(dtype) * one.scale
    square, top = _part(rms, atom) ** 2, _part(largest, atom)
    if side == "first":
        return dataclasses.replace(one, first_square=max(one.first_square, square), first_max=max(one.first_max, top))
    return dataclasses.replace(one, second_square=max(one.second_square, square), second_max=max(one.second_max, top))


def sum_floor(dtype: str, rows: int) -> float:
    """Return what is allowed beyond the floor, in units of the last place, to a tensor that is a sum over rows.

    The rounding errors of a sum that is taken one row after the other grow with the square root of the rows; which
    libraries do so for which shapes is no fault. In 16 bits each row may be rounded, in 32 bits a block of rows.
    """
    together = ROWS_TOGETHER.get(dtype)
    return FLOOR_ULPS * (math.sqrt(max(rows / together, 1.0)) - 1.0) if together else 0.0


def precision_used(measures: Sequence[Measure], noise: float = 0.0) -> tuple[float, float]:
    """Return the shares of the precision allowance that the first and the second side took."""
    groups = collections.defaultdict(list)
    for one in measures:
        groups[one.group, one.weights].append(one)
    floor = FLOOR_ULPS + noise
    shares = []
    for mine, other in (("first", "second"), ("second", "first")):
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


def allowed_meaning(one: Measure, dtype: str) -> float:
    """Return the float64 difference that a measure is allowed, as a part of the scale of its kind."""
    return _allowed_meaning((one.first_max, one.second_max), one.scale, one.meaning_scale, dtype) + one.given


def _allowed_meaning(errors: Sequence[float], scale: float, meaning_scale: float, dtype: str) -> float:
    """Return the float64 difference that rounding alone may make, as a part of the scale of the kind.

    Rounding errors in low precision show how ill-conditioned the tensor is; in float64 they shrink with the unit. Those
    of the worse side count: if it is the only bad one (a variance that cancels), that is a fault of precision.
    """
    unit = float(np.finfo(np.float64).eps)
    error = max(errors) * (scale / meaning_scale if meaning_scale else 1.0)
    return max(MEANING_LIMIT, ROUNDING_FACTOR * error * unit if math.isfinite(error) and dtype != "float64" else 0.0)


def _with(base: TensorVerdict, verdict: Verdict, one: Measure, message: str, bad: int = 0) -> TensorVerdict:
    found = {"weights": one.weights, "worst": one.worst, "sample": one.title}
    return dataclasses.replace(base, verdict=verdict, message=message, bad=bad, **found)  # type: ignore[arg-type]


def _at(one: Measure, labels: Mapping[Side, str]) -> str:
    worst = one.worst
    index = "" if not worst.index else f" at {worst.index}"
    values = f"{labels['first']} {worst.first:.9g}, {labels['second']} {worst.second:.9g}"
    return f"; worst{index}: {values} ({one.title or f'{one.weights} weights'})"


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
