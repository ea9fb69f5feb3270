"""Measures of one tensor on one sample: the distance of the sides, and of each from its own float64 result.

The limits of the criterion are defined here, too. Arrays are not kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..results.findings import Side, Worst
from ..samples.sampling import Sample
from ..sides.arrays import release, unit_of, wide
from ..sides.subject import Array

# About 4,500 units of float64 (2.2e-16). Of 22,368 tensors of 99 right pairs (`fault_lab`, seeds from 81,000), 97.5 %
# were within 1e-14 and all but 9 within this limit; those 9 were within what `ROUNDING_FACTOR` allows.
MEANING_LIMIT = 1e-12
# Measured on 2,448 outputs and gradients of a pre-norm block in float32, torch and JAX against float64, over scales of
# inputs and weights: the rms errors of right pairs differ by a factor of up to 2.26, the largest errors by up to 4.94.
RMS_LIMIT = 3.0
MAX_LIMIT = 5.0
# A correctly rounded result is up to half a unit off.
FLOOR_ULPS = 0.5

GROUP_FACTOR = 4.0
"""A single group may be this many times further off than all groups together: it holds only a few roundings."""

# Of the tensors counted above, those more than 3e-13 apart were so by at most 16 times what the errors predict.
ROUNDING_FACTOR = 100.0
"""Float64 results may differ by this many times what their rounding errors in low precision predict."""

ROWS_TOGETHER = {"bfloat16": 1, "float16": 1, "float32": 4}
"""Rows that any library adds up with errors below the floor: measured in float32, where small products of 20,000 rows
are 6 units off in torch and 0.7 in XLA, larger ones of 2,048 rows 0.4 in torch and 1.9 in XLA (CPU, rms)."""

TABLE_FACTOR = 4.0
"""Tables may explain this many times what moving their entries at random by one unit of float32 does: the errors of a
table that is computed in float32 are a few units, and not at random."""

FLASH_FACTOR = 4.0
"""Fused attention may lose this many times in float64 what two random draws of its formula's roundings do: right pairs
lose up to 1.3 times that."""

FLASH_LIMIT = 1e-9
"""Part of the largest of its kind beyond which fused attention explains nothing in float64: right pairs whose weights
are ten times the usual, and inputs thirty times, lose up to 1.2e-10."""

TABLE_LIMIT = 1e-3
"""Relative difference beyond which tables in float32 are not asked for an explanation."""

LITERAL_LIMIT = 2.0**-23
"""Part of the largest of its kind beyond which literals and branches of float32 accuracy explain nothing: each side
may be off by the unit roundoff of float32, 2**-24, and more than both together is a difference that float32 shows."""

ZERO = 1e-13
"""A gradient below this part of the largest of its kind is zero in exact arithmetic."""

# The constants in use begin with -10000 and -65504, the lowest number of float16; scores beside them are some tens.
FAR = 1e4
"""Entries that a mask sets to a constant are at least this large, and hundreds of times larger than the others."""

GAP = 100.0
NOISE = 0.1
"""Part of the other entries beyond which an error in low precision shows that they are rounding errors of the far."""


def meaning_limit(errors: Sequence[float], scale: float, meaning_scale: float, dtype: str) -> float:
    """Return the float64 difference that rounding alone may make, as a part of the scale of the kind.

    Rounding errors in low precision show how ill-conditioned the tensor is; in float64 they shrink with the unit. Those
    of the worse side count: if it is the only bad one (a variance that cancels), that is a fault of precision.
    """
    unit = float(np.finfo(np.float64).eps)
    # From units of the tensor's own scale to those of its kind's, of which the limit is a part.
    error = max(errors) * (scale / meaning_scale if meaning_scale else 1.0)
    return max(MEANING_LIMIT, ROUNDING_FACTOR * error * unit if math.isfinite(error) and dtype != "float64" else 0.0)


def sum_floor(dtype: str, rows: int) -> float:
    """Return the allowance of a sum over rows beyond the floor, in units of the last place.

    The rounding errors of a sequential sum grow with the square root of the rows, and libraries choose the order of
    summation by shape, so that a larger error is not a fault. In 16 bits each row may be rounded, in 32 bits a block of
    rows.
    """
    together = ROWS_TOGETHER.get(dtype)
    # Roundings of half a unit walk at random: sqrt(rows) of them, less the one that the floor allows anyway.
    return FLOOR_ULPS * (math.sqrt(max(rows / together, 1.0)) - 1.0) if together else 0.0


def flushed_below(dtype: str) -> float:
    """Return the size up to which the precision of a tensor is not judged; 0 where every number is kept.

    Processors and compilers may flush numbers below the smallest normal one to zero, and lose the last digits of
    slightly larger ones. float16 is always computed in a wider unit, and float64 stays far above that size.
    """
    if dtype not in ("float32", "bfloat16"):
        return 0.0
    # A number of this size has its last digit at the smallest normal number: below, the digit is subnormal.
    return float(np.finfo(np.float32).tiny) / unit_of(dtype)


MeasureKey = tuple[str, str]
"""Name of a tensor, and mode."""

# 512 KiB of float64.
CHUNK = 1 << 16
"""Elements that are measured at a time: few enough to stay in the processor's cache."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """The measures of one tensor on one sample; errors are in units of the last place of `scale`.

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
        worst: the element that is furthest off, by meaning if known, else by precision.
        is_zero: whether both float64 results are zero up to rounding.
        stress: whether the inputs were drawn to be hard; such a sample counts for the meaning alone.
        title: the name of the sample in reports.
        allowance: the difference in meaning that is allowed, as a part of `meaning_scale`: the effect of one float32
            unit in tables without parameters, and the loss from the formula of fused attention.
        part: largest absolute value of the tensor, as a part of `meaning_scale`.
        rounded: the element with the largest rounding error, with both results in the precision.
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
    allowance: float = 0.0
    part: float = 1.0
    is_flushed: bool = False
    rounded: Worst | None = None


@dataclasses.dataclass
class Explained:
    """Explanations of differences in meaning, which are allowed; in parts of the largest value.

    Attributes:
        tables: by tables in float32.
        flash: by the formula of fused attention.
        literals: by literals and branches that a float32 run cannot distinguish.
        unseen: the sample that showed the literals.
    """

    tables: float = 0.0
    flash: float = 0.0
    literals: float = 0.0
    unseen: Sample | None = None

    def join(self, other: Explained) -> None:
        """Add the explanations of another sample, precision or look."""
        self.tables, self.flash = max(self.tables, other.tables), max(self.flash, other.flash)
        self.literals, self.unseen = max(self.literals, other.literals), self.unseen or other.unseen


def scale_of(arrays: Sequence[Array]) -> float:
    """Return the largest finite absolute value."""
    return max((_largest(array) for array in arrays if array.dtype.kind in "fV" and array.size), default=0.0)


@dataclasses.dataclass(frozen=True)
class FarEntries:
    """Entries of a tensor that a mask sets to a large constant, such as scores of -1e9, and the scale of the others.

    They would hide any difference of the others, so they are measured as parts of themselves: times `factor`.

    Attributes:
        is_far: flat; where they are.
        factor: brings them to the size of the others.
        scale: largest absolute value of the others.
    """

    is_far: Array
    factor: float
    scale: float

    @classmethod
    def of(cls, truth: Array, results: Sequence[Array]) -> FarEntries | None:
        """Return the far entries of a tensor; None without any, or if the others are but rounding errors of these.

        Args:
            truth: the tensor in float64, or as precise as there is.
            results: both sides' results in low precision.
        """
        top = _largest(truth)
        if top < FAR:
            return None
        flat = wide(truth).reshape(-1)
        size = np.where(np.isfinite(flat), np.abs(flat), 0.0)
        is_far = size > top / FAR
        scale = float(size[~is_far].max(initial=0.0))
        if not 0.0 < scale * GAP < float(size[is_far].min()):
            return None
        others = ~is_far & np.isfinite(flat)
        apart = [float(np.abs(wide(result).reshape(-1)[others] - flat[others]).max()) for result in results]
        return cls(is_far, scale / top, scale) if any(one < NOISE * scale for one in apart) else None

    def scaled(self, piece: Array, start: int) -> Array:
        """Return a piece of a flat array with its far entries brought to the size of the others."""
        return np.where(self.is_far[start : start + piece.size], piece * self.factor, piece)


def without_far_entries(first: Array, second: Array) -> tuple[Array, Array, float]:
    """Return two arrays of floats, with the far entries of the first brought to the size of the others, and a scale.

    The scale is the largest absolute value of both, or of the first's other entries.
    """
    far = FarEntries.of(first, (first,)) if first.shape == second.shape else None
    if far is None:
        return first, second, scale_of([first, second])
    first, second = (far.scaled(wide(array).reshape(-1), 0).reshape(array.shape) for array in (first, second))
    return first, second, far.scale


def are_close(first: Sequence[Array], second: Sequence[Array], limit: float) -> bool:
    """Return whether arrays are alike: in shape, and up to `limit` of the largest number of all, but for far entries.

    NaN is alike nothing, and whole numbers and truth values are alike where all are the same.
    """
    if any(one.shape != two.shape for one, two in zip(first, second, strict=True)):
        return False
    each = list(zip(first, second, strict=True))
    whole = [pair for pair in each if any(array.dtype.kind in "biu" for array in pair)]
    if not all(np.array_equal(*pair) for pair in whole):
        return False
    rest = [pair for pair in each if not any(array.dtype.kind in "biu" for array in pair)]
    pairs = [without_far_entries(wide(one), wide(two)) for one, two in rest]
    scale = max((scale for *_, scale in pairs), default=0.0) or 1.0
    return all(float(np.abs(one - two).max(initial=0.0)) <= limit * scale for one, two, _ in pairs)


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
    far: FarEntries | None = None,
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
        far: its entries that are measured as parts of themselves.
    """
    if first.shape != second.shape:
        raise ValueError(f"arrays to be measured must have one shape, got {first.shape} and {second.shape}")
    arrays = [None if one is None else one.reshape(-1) for one in (first, second, first_oracle, second_oracle)]
    truths = [one for one in (first_oracle, second_oracle) if one is not None] or [first]
    own_scale = max(map(_largest, truths)) if far is None else far.scale
    meaning_scale = max(kind_scale, own_scale)
    # A tensor that is zero in exact arithmetic is rounding error alone, however small: in units of itself it would be
    # all error, so the largest of its kind measures it.
    scale = own_scale if own_scale > 1e-6 * meaning_scale else meaning_scale
    tally = _Tally(meaning_scale)
    for start in range(0, max(first.size, 1), CHUNK):
        pieces = [None if one is None else chunk(one, start) for one in arrays]
        tally.add(start, pieces if far is None else [None if one is None else far.scaled(one, start) for one in pieces])
    release(first, second, first_oracle, second_oracle)
    is_flushed = 0.0 < max(scale, *tally.largest) <= flushed_below(dtype)
    atom = math.inf if is_flushed else unit_of(dtype) * scale
    size = max(first.size, 1)
    meaning = _part(tally.apart, meaning_scale) if len(truths) == 2 else None
    # `atom` is infinite where numbers may be flushed: every error is 0 units then, and the precision passes.
    errors = [_part(largest, atom) for largest in tally.largest]
    meant = meaning is not None and meaning > meaning_limit(errors, scale, meaning_scale, dtype)
    flat_index = tally.apart_at if meant else tally.error_at
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
        worst=_worst(sample, tally.mismatch_at if tally.mismatched else flat_index, values, oracle, first.shape),
        is_zero=own_scale <= ZERO * meaning_scale,
        stress=stress,
        title=title,
        part=_part(own_scale, meaning_scale),
        is_flushed=is_flushed,
        rounded=_worst(sample, tally.error_at, (first, second), oracle, first.shape),
    )


def with_table_error(measured: Measure, moved: float) -> Measure:
    """Return the measure with the allowance for float32 tables: how far moving them by one unit moves the result."""
    return dataclasses.replace(measured, allowance=TABLE_FACTOR * _part(moved, measured.meaning_scale))


def with_literal_error(measured: Measure, moved: float) -> Measure:
    """Return the measure with an allowance for literals and branches that float32 cannot show."""
    return dataclasses.replace(measured, allowance=measured.allowance + _part(moved, measured.meaning_scale))


def with_flash_loss(measured: Measure, lost: float) -> Measure:
    """Return the measure with an allowance for the loss that the formula of fused attention causes in float64."""
    allowed = min(FLASH_FACTOR * _part(lost, measured.meaning_scale), FLASH_LIMIT)
    return dataclasses.replace(measured, allowance=measured.allowance + allowed)


def with_error(measured: Measure, side: Side, rms: float, largest: float, dtype: str) -> Measure:
    """Return the measure with at least the error that a side makes under other roundings: its rms and its largest."""
    atom = math.inf if measured.is_flushed else unit_of(dtype) * measured.scale
    square, top = _part(rms, atom) ** 2, _part(largest, atom)
    if side == "first":
        return dataclasses.replace(
            measured, first_square=max(measured.first_square, square), first_max=max(measured.first_max, top)
        )
    return dataclasses.replace(
        measured, second_square=max(measured.second_square, square), second_max=max(measured.second_max, top)
    )


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
        present = [piece for piece in pieces if piece is not None]
        finite: Array | None = None
        # A finite sum has finite summands and needs no array of truth values; only others are looked at one by one.
        if not all(np.isfinite(piece.sum()) or np.isfinite(piece).all() for piece in present):
            finite = np.logical_and.reduce([np.isfinite(piece) for piece in present])
            # Infinities of one sign and NaN on both sides agree, in the precision and in float64.
            pairs = [(first, second)] + (
                [(first_oracle, second_oracle)] if first_oracle is not None and second_oracle is not None else []
            )
            alike = np.logical_and.reduce(
                [np.isfinite(a) & np.isfinite(b) | (np.isnan(a) & np.isnan(b)) | (a == b) for a, b in pairs]
            )
            unlike = ~alike & ~_overflown(pieces)
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
        # A side without float64 is measured by the float64 of the other; without any, the first side is the measure of
        # both.
        truths = (
            first_oracle if first_oracle is not None else second_oracle if second_oracle is not None else first,
            second_oracle if second_oracle is not None else first_oracle if first_oracle is not None else first,
        )
        for side, (result, truth) in enumerate(zip((first, second), truths, strict=True)):
            error = _apart(result, truth, finite)
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
    overflown: Array = ~np.isfinite(first) & ~np.isfinite(second)
    for truth in truths:
        assert truth is not None
        overflown &= np.isfinite(truth)
    return overflown


def chunk(array: Array, start: int) -> Array:
    """Return a piece of a flat array in float64, `CHUNK` elements from `start` on."""
    piece = array[start : start + CHUNK]
    return piece if piece.dtype == np.float64 else piece.astype(np.float64)


def _largest(array: Array) -> float:
    """Return the largest finite absolute value."""
    flat = array.ravel(order="K")  # in the order of memory, in which a turned array is not copied
    largest = 0.0
    for start in range(0, flat.size, CHUNK):
        piece = np.abs(flat[start : start + CHUNK].astype(np.float64, copy=False))
        top = float(piece.max(initial=0.0))
        if not math.isfinite(top):
            top = float(piece[np.isfinite(piece)].max(initial=0.0))
        largest = max(largest, top)
    release(array)
    return largest


def _apart(result: Array, truth: Array, finite: Array | None) -> Array:
    """Return the absolute differences; 0 where `finite` is False."""
    if finite is not None:
        result, truth = np.where(finite, result, 0.0), np.where(finite, truth, 0.0)
    difference: Array = np.subtract(result, truth)
    np.abs(difference, out=difference)
    return difference


def _worst(
    sample: int, flat_index: int, values: Sequence[Array | None], oracle: Array | None, shape: tuple[int, ...]
) -> Worst:
    if not math.prod(shape):
        return Worst(sample, (), math.nan, math.nan, None)
    index = tuple(int(i) for i in np.unravel_index(flat_index, shape))
    first_number, second_number = (float(value[index]) if value is not None else math.nan for value in values)
    return Worst(sample, index, first_number, second_number, None if oracle is None else float(oracle[index]))


def _part(value: float, whole: float) -> float:
    return 0.0 if value == 0.0 else value / whole if whole else math.inf
