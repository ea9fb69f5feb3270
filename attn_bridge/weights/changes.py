"""Numbers that another library stores scaled or shifted, and their conversion to ours and back."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Change:
    """Theirs are ours times a factor, plus a term; computed in float32, or in float64 for float64 numbers.

    Attributes:
        times: the factor.
        plus: the term.
    """

    times: float = 1.0
    plus: float = 0.0

    def __str__(self) -> str:
        return f"times {self.times:.6g}" if self.times != 1 else f"plus {self.plus:.6g}"

    def there(self, array: Array) -> Array:
        """Return theirs, rounded to the dtype of ours."""
        times, plus, numbers = self._in(array)
        with np.errstate(all="ignore"):
            return rounded(numbers * times + plus if self.plus else numbers * times, array.dtype)

    def back(self, array: Array) -> Array:
        """Return ours, rounded to the dtype of theirs: exact for powers of two as factors, and for little else."""
        times, plus, numbers = self._in(array)
        with np.errstate(all="ignore"):
            return rounded((numbers - plus) / times if self.plus else numbers / times, array.dtype)

    def _in(self, array: Array) -> tuple[object, object, Array]:
        kind = np.float64 if array.dtype == np.float64 else np.float32
        return kind(self.times), kind(self.plus), array.astype(kind, copy=False)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Arithmetic on the numbers of a tensor between two layouts, by way of ours.

    Attributes:
        source: change from ours to the source's numbers; None: the source has ours.
        target: the same for the target.
    """

    source: Change | None = None
    target: Change | None = None

    def __bool__(self) -> bool:
        return self.source != self.target

    def apply(self, array: Array) -> Array:
        """Return the target's numbers computed from the source's."""
        ours = array if self.source is None else self.source.back(array)
        return ours if self.target is None else self.target.there(ours)

    @property
    def turned(self) -> Steps:
        """The inverse steps."""
        return Steps(self.target, self.source)


NO_STEPS = Steps()


def is_float(dtype: np.dtype) -> bool:
    """Whether numbers of that dtype can be scaled."""
    return dtype.name in ("bfloat16", "float16", "float32", "float64")


def wider(first: np.dtype, second: np.dtype) -> np.dtype:
    """Return the smallest of float dtypes that holds the numbers of both."""
    if first == second:
        return first
    return np.dtype(np.float64) if np.float64 in (first, second) else np.dtype(np.float32)


def rounded(array: Array, dtype: np.dtype) -> Array:
    """Cast to the nearest number, ties to even, in one rounding.

    NumPy's way from float64 to bfloat16 leads through float32 and rounds twice; to odd first, the second one is right
    (Boldo and Melquiond, 2008).
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if array.dtype != np.float64 or dtype != ml_dtypes.bfloat16:
            return array.astype(dtype, copy=False)
        single = array.astype(np.float32)
    inexact = np.isfinite(array) & (single != array)
    bits = single.view(np.uint32)
    bits -= (inexact & (np.abs(single.astype(np.float64)) > np.abs(array))).astype(np.uint32)  # towards zero
    bits |= inexact.astype(np.uint32)
    return single.astype(dtype)
