"""The base class of masks, masks of arrays, and derived masks: seen from another position, ``&`` and ``|``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from .. import validation

Integers: TypeAlias = Any
"""An array of integers, of any backend."""

Bools: TypeAlias = Any
"""A bool array, of any backend."""

AnyArray: TypeAlias = Any
"""An array of any dtype and backend."""

Interval = tuple[np.ndarray, np.ndarray]
"""First visible key of each query, and the end (exclusive) of its visible keys."""


class Positions(Protocol):
    """Integer positions of queries or keys in an array of any backend; results broadcast one against the other."""

    def __add__(self, other: int, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mod__(self, other: int, /) -> Any: ...
    def __floordiv__(self, other: int, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Mask:
    """Base of all descriptions. Descriptions without arrays are equal by value, so that a jit takes them as static."""

    __array_ufunc__ = None  # NumPy arrays leave `array & mask` to `Mask.__rand__`

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        """Return the bool array of visible pairs.

        Args:
            query_positions: integer array broadcastable against `key_positions`, usually ``(T, 1)``.
            key_positions: integer array, usually ``(1, S)``.
        """
        raise NotImplementedError

    def visibility(self, queries: range, keys: range) -> bool | None:
        """Return whether all queries see all keys (True), none sees any (False), or arrays must decide (None).

        Determined without arrays, so that a kernel skips invisible blocks and masks only partly visible ones.

        Args:
            queries: positions of a block of queries, not empty, in steps of 1.
            keys: positions of a block of keys, not empty, in steps of 1.
        """
        return None

    def interval(self, queries: np.ndarray) -> Interval | None:
        """Return the first visible key of each query, and the end (exclusive) of them; None if a query has gaps.

        Determined without arrays. The bounds may be outside the existing keys, and the end before the start.

        Args:
            queries: positions ``(T,)`` in NumPy; except for ``|``, our own masks accept torch tensors as well.
        """
        return None

    def first_key(self, query: int) -> int:
        """Return a position before which no query from position `query` on sees a key; 0 without such a bound."""
        return 0

    @property
    def reach(self) -> int | None:
        """Maximum number of most recent keys, its own included, that a query sees; None without such a bound."""
        return None

    @property
    def counts_tokens(self) -> bool:
        """Whether distances from the first token matter, which `behind` counts without padding."""
        return False

    def placed(self, queries: int, keys: int) -> Mask:
        """Return this mask for exactly that many queries and keys, from position 0 each.

        Its arrays then have the axes ``(B, H, T, S)``, each whole or 1, so that a kernel reads them in blocks.
        """
        return self

    def placed_at(self, queries: slice, keys: slice) -> Mask | None:
        """Return this mask for these queries and keys, if it can be cut to both; None for all other masks."""
        return None

    def check_arrays(self, check: Callable[[AnyArray], None]) -> None:
        """Call `check` with every bool array inside the description; other arrays were checked when it was made."""

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        """Check that the description's data per sequence, and per token, cover at least these numbers.

        Args:
            batch: sequences; data for a single sequence apply to all.
            tokens: queries and keys together, those in a cache included; 0 leaves that to `placed`.

        Raises:
            ValueError: they do not.
        """

    def arrays(self) -> Iterator[AnyArray]:
        """Yield the arrays inside the description, for a backend to place on its device."""
        return iter(())

    def with_arrays(self, convert: Callable[[AnyArray], AnyArray]) -> Mask:
        """Return the same description with every array replaced by ``convert(array)``."""
        return self

    def with_bool_arrays(self, convert: Callable[[object], object]) -> Mask:
        """Return the same description with every array that `check_arrays` checks replaced by ``convert(array)``."""
        return self

    def separate(self) -> tuple[Mask, tuple[AnyArray, ...]]:
        """Return a description with a numbered placeholder for each array, equal by value, and the arrays.

        A compiler takes the first as static and the second as data; ``with_arrays`` brings them together again.
        """
        counter = itertools.count()
        return self.with_arrays(lambda _: ArrayPlaceholder(next(counter))), tuple(self.arrays())

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        """Return this mask for queries that start at position `n` (decoding after `n` cached tokens).

        Args:
            n: position of the first query.
            keys: position of the first key, if invisible keys are left out.
        """
        return Offset(self, integer("n", n), integer("keys", keys))

    def behind(self, padding: Integers) -> Mask:
        """Return this mask for sequences that each begin with some padding.

        Args:
            padding: integers ``(B, 1, 1, 1)``: tokens of padding in front of each sequence.
        """
        return Behind(padding, self) if self.counts_tokens else self

    def allowed_behind(self, padding: Integers, query_positions: Positions, key_positions: Positions) -> Bools:
        """Return the bool array of visible pairs for sequences that begin with padding, as `behind` takes it."""
        return self.allowed(query_positions - padding, key_positions - padding)

    def picked(self, keys: object) -> Mask:
        """Return this mask with the columns of its bool arrays picked: those of the keys at these positions ``(S,)``.

        Its ``allowed(query_positions, keys)`` then is about these keys, in any order.
        """
        return self

    def restrict(self, other: object) -> Mask:
        """Return this mask and `other` (a mask or a bool array) together; None restricts nothing.

        The same as ``&``, which a compiler that traces arrays may claim for itself.
        """
        return self if other is None else AllOf((*parts_of(self, AllOf), *parts_of(as_mask(other), AllOf)))

    def __and__(self, other: object) -> Mask:
        return self.restrict(as_mask(other))

    def __or__(self, other: object) -> Mask:
        return AnyOf((*parts_of(self, AnyOf), *parts_of(as_mask(other), AnyOf)))

    __rand__ = __and__
    __ror__ = __or__


@dataclass(frozen=True)
class ArrayPlaceholder:
    """Placeholder for an array in a description that was separated from its arrays."""

    number: int


@dataclass(frozen=True, eq=False)
class OfArrays(Mask):
    """Base of the masks of one or two array fields; equal by identity, or by value if the fields are placeholders."""

    @property
    def _held(self) -> tuple[object, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __eq__(self, other: object) -> bool:
        if type(self) is type(other) and isinstance(other, OfArrays) and isinstance(self._held[0], ArrayPlaceholder):
            return isinstance(other._held[0], ArrayPlaceholder) and self._held == other._held
        return self is other

    def __hash__(self) -> int:
        return hash(self._held) if isinstance(self._held[0], ArrayPlaceholder) else id(self)

    def arrays(self) -> Iterator[AnyArray]:
        """Yield its arrays."""
        yield from self._held

    def with_arrays(self, convert: Callable[[AnyArray], AnyArray]) -> Mask:
        """Return the mask of the converted arrays."""
        return type(self)(*map(convert, self._held))


@dataclass(frozen=True, eq=False)
class ArrayMask(OfArrays):
    """A bool array from the user: ``(B, S)`` for padding, or broadcastable to ``(B, H, T, S)``."""

    array: AnyArray

    def allowed(self, query_positions: object, key_positions: object) -> Bools:
        """Return the array with the axes of heads and queries added where it is ``(B, S)``."""
        return self.array[:, None, None, :] if self.array.ndim == 2 else self.array

    def check_arrays(self, check: Callable[[AnyArray], None]) -> None:
        """Check the array."""
        check(self.array)

    def with_bool_arrays(self, convert: Callable[[object], object]) -> Mask:
        """Return the mask of the converted array."""
        return ArrayMask(convert(self.array))

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        """Return the mask itself, without its first `keys` columns: its rows are the current queries."""
        return self if keys == 0 or self._is_one_column() else ArrayMask(self.array[..., keys:])

    def picked(self, keys: object) -> Mask:
        """Return the mask of the columns of these keys."""
        return self if self._is_one_column() else ArrayMask(self.array[..., keys])

    def _is_one_column(self) -> bool:
        return bool(self.array.ndim == 0 or self.array.shape[-1] == 1)


@dataclass(frozen=True, eq=False)
class Behind(OfArrays):
    """A mask for sequences that begin with some padding, ``(B, 1, 1, 1)``, which hides nothing itself."""

    padding: Integers
    mask: Mask

    def arrays(self) -> Iterator[AnyArray]:
        yield self.padding

    def with_arrays(self, convert: Callable[[AnyArray], AnyArray]) -> Mask:
        return Behind(convert(self.padding), self.mask)

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        validation.check_mask_rows("padding of a mask", self.padding.shape[0], batch)

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return self.mask.allowed_behind(self.padding, query_positions, key_positions)

    def first_key(self, query: int) -> int:
        # Padding moves the borders of chunks by a number per sequence; whatever it is, no query sees beyond its reach.
        return 0 if self.reach is None else max(0, query - self.reach + 1)

    @property
    def reach(self) -> int | None:
        return self.mask.reach


@dataclass(frozen=True)
class Offset(Mask):
    """A mask seen by queries and keys that start at other positions."""

    mask: Mask
    n: int
    keys: int = 0

    def arrays(self) -> Iterator[AnyArray]:
        return self.mask.arrays()

    def check_arrays(self, check: Callable[[AnyArray], None]) -> None:
        self.mask.check_arrays(check)

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        # 0 stays 0: the number of tokens is not known yet.
        self.mask.check_sizes(batch, tokens and tokens + max(self.n, self.keys))

    def with_arrays(self, convert: Callable[[AnyArray], AnyArray]) -> Mask:
        return Offset(self.mask.with_arrays(convert), self.n, self.keys)

    def with_bool_arrays(self, convert: Callable[[object], object]) -> Mask:
        return Offset(self.mask.with_bool_arrays(convert), self.n, self.keys)

    def placed(self, queries: int, keys: int) -> Mask:
        mask = self.mask.placed_at(slice(self.n, self.n + queries), slice(self.keys, self.keys + keys))
        return self if mask is None else mask

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        return self.mask.offset(self.n + n, keys=self.keys + keys)

    @property
    def counts_tokens(self) -> bool:
        return self.mask.counts_tokens

    def behind(self, padding: Integers) -> Mask:
        return Offset(self.mask.behind(padding), self.n, self.keys)

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return self.mask.allowed(query_positions + self.n, key_positions + self.keys if self.keys else key_positions)

    def visibility(self, queries: range, keys: range) -> bool | None:
        queries = range(queries.start + self.n, queries.stop + self.n)
        return self.mask.visibility(queries, range(keys.start + self.keys, keys.stop + self.keys))

    def interval(self, queries: np.ndarray) -> Interval | None:
        interval = self.mask.interval(queries + self.n)
        return interval and (interval[0] - self.keys, interval[1] - self.keys)

    def first_key(self, query: int) -> int:
        return max(0, self.mask.first_key(query + self.n) - self.keys)


@dataclass(frozen=True)
class Combined(Mask):
    """Base of masks that combine several parts."""

    parts: tuple[Mask, ...]

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        answers = (part.allowed(query_positions, key_positions) for part in self.parts)
        return functools.reduce(self._combine, answers)

    def arrays(self) -> Iterator[AnyArray]:
        return itertools.chain.from_iterable(part.arrays() for part in self.parts)

    def with_arrays(self, convert: Callable[[AnyArray], AnyArray]) -> Mask:
        return type(self)(tuple(part.with_arrays(convert) for part in self.parts))

    def with_bool_arrays(self, convert: Callable[[object], object]) -> Mask:
        return type(self)(tuple(part.with_bool_arrays(convert) for part in self.parts))

    def check_arrays(self, check: Callable[[AnyArray], None]) -> None:
        for part in self.parts:
            part.check_arrays(check)

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        for part in self.parts:
            part.check_sizes(batch, tokens)

    def placed(self, queries: int, keys: int) -> Mask:
        return type(self)(tuple(part.placed(queries, keys) for part in self.parts))

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        return type(self)(tuple(part.offset(n, keys=keys) for part in self.parts))

    @property
    def counts_tokens(self) -> bool:
        return any(part.counts_tokens for part in self.parts)

    def behind(self, padding: Integers) -> Mask:
        return type(self)(tuple(part.behind(padding) for part in self.parts))

    def picked(self, keys: object) -> Mask:
        return type(self)(tuple(part.picked(keys) for part in self.parts))

    @staticmethod
    def _combine(first: object, second: object) -> object:
        raise NotImplementedError


@dataclass(frozen=True)
class AllOf(Combined):
    """Pairs that every part allows."""

    @staticmethod
    def _combine(first: Bools, second: Bools) -> object:
        return first & second

    def visibility(self, queries: range, keys: range) -> bool | None:
        # None is not exact: parts that each hide something may together hide all. A kernel then masks a block in vain.
        answers = {part.visibility(queries, keys) for part in self.parts}
        return False if False in answers else None if None in answers else True

    def interval(self, queries: np.ndarray) -> Interval | None:
        intervals = [part.interval(queries) for part in self.parts]
        bounds = [interval for interval in intervals if interval is not None]
        return functools.reduce(_intersection, bounds) if len(bounds) == len(intervals) else None

    def first_key(self, query: int) -> int:
        return max(part.first_key(query) for part in self.parts)

    @property
    def reach(self) -> int | None:
        return min((part.reach for part in self.parts if part.reach is not None), default=None)


@dataclass(frozen=True)
class AnyOf(Combined):
    """Pairs that any part allows."""

    @staticmethod
    def _combine(first: Bools, second: Bools) -> object:
        return first | second

    def visibility(self, queries: range, keys: range) -> bool | None:
        answers = {part.visibility(queries, keys) for part in self.parts}
        return True if True in answers else None if None in answers else False

    def interval(self, queries: np.ndarray) -> Interval | None:
        intervals = [part.interval(queries) for part in self.parts]
        return None if None in intervals else functools.reduce(_union, intervals)

    def first_key(self, query: int) -> int:
        return min(part.first_key(query) for part in self.parts)

    @property
    def reach(self) -> int | None:
        reaches = [part.reach for part in self.parts]
        return None if None in reaches else max(reach for reach in reaches if reach is not None)


def _intersection(first: Interval, second: Interval) -> Interval:
    """Return the intersections of pairs of intervals, with operations that NumPy and torch share."""
    (start, end), (other_start, other_end) = first, second
    # a + max(b - a, 0) is max(a, b), and a - max(a - b, 0) is min(a, b).
    return start + (other_start - start).clip(0), end - (end - other_end).clip(0)


def _union(first: Interval | None, second: Interval | None) -> Interval | None:
    """Return the unions of pairs of intervals; None if a pair has a gap."""
    if first is None or second is None:
        return None
    (start, end), (other_start, other_end) = first, second
    is_empty, other_is_empty = start >= end, other_start >= other_end
    if not np.all(is_empty | other_is_empty | ((start <= other_end) & (other_start <= end))):
        return None
    starts = np.where(is_empty, other_start, np.where(other_is_empty, start, np.minimum(start, other_start)))
    ends = np.where(is_empty, other_end, np.where(other_is_empty, end, np.maximum(end, other_end)))
    return starts, ends


def as_mask(value: object) -> Mask:
    """Return a description as it is, and a bool array (or nested lists) as one.

    Raises:
        TypeError: `value` is neither.
    """
    if isinstance(value, Mask):
        return value
    if not isinstance(value, (list, tuple)) and not hasattr(value, "dtype"):
        raise TypeError(f"a mask must be an attn_bridge.masks description or a bool array, got {type(value).__name__}")
    return ArrayMask(value)


def parts_of(mask: Mask, kind: type[Combined]) -> tuple[Mask, ...]:
    """Return the parts of a combination of a kind; any other mask as a single part."""
    return mask.parts if isinstance(mask, kind) else (mask,)


def integer(name: str, value: Any) -> int:
    """Return an argument as an integer; its name is for the error."""
    if type(value) is int or type(value).__name__ == "SymInt":
        number: int = value
        return number  # torch.compile knows the type of its symbols, and nothing of `hasattr`; torch.export has its own
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    return int(operator.index(value))
