"""Where the elements of our tensors are in outside ones, which may be scaled or shifted: an offset and strides."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

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


Shape = tuple[int, ...]
Axes = tuple[tuple[int, int], ...]
"""(size, stride in elements of the outside tensor), outermost first."""


class LayoutError(ValueError):
    """Names, shapes or settings that do not fit a layout, in one line."""


class SettingError(LayoutError):
    """A setting is missing that names and shapes don't determine."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Positions of the elements of one of our tensors in an outside tensor.

    Attributes:
        theirs: name of the outside tensor.
        offset: index of the first element.
        axes: per axis of ours, the outside axes that it consists of.
        change: change from our numbers to theirs; None: they are the same.
        start: the first row of ours that it places; `axes` are those of the rows from there on.
        rest: placements of the rows behind these, in further outside tensors.
    """

    theirs: str
    offset: int
    axes: tuple[Axes, ...]
    change: Change | None = None
    start: int = 0
    rest: tuple[Placement, ...] = ()

    @property
    def shape(self) -> Shape:
        """Shape of our tensor, of the rows that it places."""
        shape = tuple(math.prod(size for size, _ in axis) for axis in self.axes)
        return (sum(one.rows for one in self.pieces), *shape[1:]) if self.rest else shape

    @property
    def rows(self) -> int:
        """Rows of ours in its outside tensor; 1 for a tensor without axes."""
        return math.prod(size for size, _ in self.axes[0]) if self.axes else 1

    @property
    def pieces(self) -> tuple[Placement, ...]:
        """The placement in each outside tensor, in order of our rows."""
        return (dataclasses.replace(self, rest=()), *self.rest) if self.rest else (self,)

    def narrowed(self, start: int, stop: int) -> Placement:
        """Return the placement of our rows from `start` to `stop`, all of them in its outside tensor.

        Raises:
            LayoutError: the rows are cut where an outside axis is not.
        """
        if (start, stop) == (self.start, self.start + self.rows):
            return self
        (size, stride), *inner = self.axes[0]
        step = math.prod(size for size, _ in inner)
        if (start - self.start) % step or (stop - start) % step:
            raise LayoutError(f"{self.theirs}: {size * step} rows are not cut at {start} and {stop}")
        rows = (((stop - start) // step, stride), *inner)
        offset = self.offset + (start - self.start) // step * stride
        return dataclasses.replace(self, offset=offset, axes=(rows, *self.axes[1:]), start=start)


def joined(pieces: Mapping[int, Placement]) -> Placement:
    """Return the placement of a tensor of ours from those of its pieces, by number.

    Raises:
        LayoutError: they differ in more than their rows.
    """
    ordered, start = [], 0
    for _, piece in sorted(pieces.items()):
        ordered.append(dataclasses.replace(piece, start=start))
        start += piece.rows
    first, *rest = ordered
    for piece in rest:
        if piece.shape[1:] != first.shape[1:]:
            shapes = f"{first.theirs} {first.shape} and {piece.theirs} {piece.shape}"
            raise LayoutError(f"{shapes} are no parts of one tensor")
    return dataclasses.replace(first, rest=tuple(rest))


def common(source: Placement, target: Placement) -> Iterator[tuple[Placement, Placement]]:
    """Yield the placements of the same rows of ours on two sides, each in one tensor."""
    for left, right in itertools.product(source.pieces, target.pieces):
        start, stop = max(left.start, right.start), min(left.start + left.rows, right.start + right.rows)
        if start < stop or left.rows == right.rows == 0:
            yield left.narrowed(start, stop), right.narrowed(start, stop)


def refined(left: Sequence[Axes], right: Sequence[Axes]) -> list[tuple[int, int, int]]:
    """Return (size, stride in one, stride in the other) of the common refinement of two placements' axes.

    Raises:
        LayoutError: they split an axis at incompatible positions, so that they don't have the same heads.
    """
    refinement: list[tuple[int, int, int]] = []
    for first, second in zip(left, right, strict=True):
        mine, its = [*first], [*second]
        pieces: list[tuple[int, int, int]] = []
        while mine and its:
            (size, stride), (other, other_stride) = mine.pop(), its.pop()
            # Innermost first: the smaller piece ends both, and what the larger one has left is cut by the next.
            step = min(size, other)
            if max(size, other) % step if step else size != other:
                raise LayoutError(f"an axis is cut into pieces of {size} on one side and of {other} on the other")
            pieces.append((step, stride, other_stride))
            if step and size > step:
                mine.append((size // step, stride * step))
            if step and other > step:
                its.append((other // step, other_stride * step))
        # Only axes of size 1 can be left over on one side; a stride of 0 does not move.
        pieces += [(size, stride, 0) for size, stride in reversed(mine)]
        pieces += [(size, 0, stride) for size, stride in reversed(its)]
        refinement += reversed(pieces)
    return [piece for piece in refinement if piece[0] != 1]
