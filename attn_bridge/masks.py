"""Who attends to whom, described once for both backends.

A mask answers ``mask.allowed(query_positions, key_positions)`` with bool arrays, ``True`` = may attend. It uses only
comparisons and logic, so it works on the index arrays of NumPy, torch and JAX alike. Masks combine with ``&`` and
``|``, also with a bool array of shape ``(B, S)`` or broadcastable to ``(B, H, T, S)``; ``mask.offset(n)`` is the same
mask seen by queries that start at position ``n``.

Without an offset, query ``i`` is position ``i`` whatever the number of keys: ``causal()`` shows it keys ``0..i``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ArrayMask", "Band", "Mask", "as_band", "as_mask", "causal", "full", "sliding_window"]


@dataclass(frozen=True, eq=False)
class Mask:
    """Base of all descriptions. Descriptions without arrays are equal by value, so that a jit takes them as static."""

    __array_ufunc__ = None  # NumPy arrays leave `array & mask` to `Mask.__rand__`

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        """Return the bool array of visible pairs.

        Args:
            query_positions: integer array broadcastable against `key_positions`, usually ``(T, 1)``.
            key_positions: integer array, usually ``(1, S)``.
        """
        raise NotImplementedError

    def visibility(self, queries: range, keys: range) -> bool | None:
        """Return whether all queries see all keys (True), none sees any (False), or it takes a look (None).

        Known without arrays, so that a kernel skips the blocks that nobody sees and masks only those that it must.

        Args:
            queries: positions of a block of queries, not empty, in steps of 1.
            keys: positions of a block of keys, not empty, in steps of 1.
        """
        return None

    def arrays(self) -> Iterator[Any]:
        """Yield the bool arrays inside the description, for a backend to check and place on its device."""
        return iter(())

    def with_arrays(self, convert: Callable[[Any], Any]) -> Mask:
        """Return the same description with every bool array replaced by ``convert(array)``."""
        return self

    def separate(self) -> tuple[Mask, tuple[Any, ...]]:
        """Return a description with a numbered place for each bool array, equal by value, and the arrays.

        A compiler takes the first as known and the second as data; ``with_arrays`` brings them together again.
        """
        counter = itertools.count()
        return self.with_arrays(lambda _: _Place(next(counter))), tuple(self.arrays())

    def offset(self, n: int) -> Mask:
        """Return this mask for queries that start at position `n` (decoding after `n` cached tokens)."""
        return _Offset(self, _integer("n", n))

    def restrict(self, other: Any) -> Mask:
        """Return this mask and `other` (a mask or a bool array) together; None restricts nothing.

        The same as ``&``, which a compiler that traces arrays may claim for itself.
        """
        return self if other is None else _All((*_parts(self, _All), *_parts(as_mask(other), _All)))

    def __and__(self, other: Any) -> Mask:
        return self.restrict(as_mask(other))

    def __or__(self, other: Any) -> Mask:
        return _Any((*_parts(self, _Any), *_parts(as_mask(other), _Any)))

    __rand__ = __and__
    __ror__ = __or__


@dataclass(frozen=True)
class _Full(Mask):
    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return (query_positions == query_positions) | (key_positions == key_positions)  # all True, of the full shape

    def visibility(self, queries: range, keys: range) -> bool | None:
        return True


@dataclass(frozen=True)
class _Causal(Mask):
    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return key_positions <= query_positions

    def visibility(self, queries: range, keys: range) -> bool | None:
        return True if keys[-1] <= queries[0] else False if keys[0] > queries[-1] else None


@dataclass(frozen=True)
class _SlidingWindow(Mask):
    size: int

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        distance = query_positions - key_positions
        return (distance >= 0) & (distance < self.size)

    def visibility(self, queries: range, keys: range) -> bool | None:
        nearest, farthest = queries[0] - keys[-1], queries[-1] - keys[0]
        if farthest < 0 or nearest >= self.size:
            return False
        return True if nearest >= 0 and farthest < self.size else None


@dataclass(frozen=True)
class _Place:
    """Stands for a bool array in a description that was separated from its arrays."""

    number: int


@dataclass(frozen=True, eq=False)
class ArrayMask(Mask):
    """A bool array given by the user: ``(B, S)`` for padding, or broadcastable to ``(B, H, T, S)``."""

    array: Any

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        """Return the array with the axes of heads and queries added where it is ``(B, S)``."""
        return self.array[:, None, None, :] if self.array.ndim == 2 else self.array

    def __eq__(self, other: object) -> bool:
        if isinstance(self.array, _Place) and isinstance(other, ArrayMask):
            return isinstance(other.array, _Place) and self.array == other.array
        return self is other

    def __hash__(self) -> int:
        return hash(self.array) if isinstance(self.array, _Place) else id(self)

    def arrays(self) -> Iterator[Any]:
        """Yield the array."""
        yield self.array

    def with_arrays(self, convert: Callable[[Any], Any]) -> Mask:
        """Return the mask of the converted array."""
        return ArrayMask(convert(self.array))

    def offset(self, n: int) -> Mask:
        """Return the mask itself: the rows of an array are the queries at hand."""
        return self


@dataclass(frozen=True)
class _Offset(Mask):
    mask: Mask
    n: int

    def arrays(self) -> Iterator[Any]:
        return self.mask.arrays()

    def with_arrays(self, convert: Callable[[Any], Any]) -> Mask:
        return _Offset(self.mask.with_arrays(convert), self.n)

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return self.mask.allowed(query_positions + self.n, key_positions)

    def visibility(self, queries: range, keys: range) -> bool | None:
        return self.mask.visibility(range(queries.start + self.n, queries.stop + self.n), keys)


@dataclass(frozen=True)
class _Combined(Mask):
    parts: tuple[Mask, ...]

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        answers = (part.allowed(query_positions, key_positions) for part in self.parts)
        return functools.reduce(self._combine, answers)

    def arrays(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(part.arrays() for part in self.parts)

    def with_arrays(self, convert: Callable[[Any], Any]) -> Mask:
        return type(self)(tuple(part.with_arrays(convert) for part in self.parts))

    def offset(self, n: int) -> Mask:
        return type(self)(tuple(part.offset(n) for part in self.parts))

    @staticmethod
    def _combine(one: Any, two: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class _All(_Combined):
    @staticmethod
    def _combine(one: Any, two: Any) -> Any:
        return one & two

    def visibility(self, queries: range, keys: range) -> bool | None:
        answers = {part.visibility(queries, keys) for part in self.parts}
        return False if False in answers else None if None in answers else True


@dataclass(frozen=True)
class _Any(_Combined):
    @staticmethod
    def _combine(one: Any, two: Any) -> Any:
        return one | two

    def visibility(self, queries: range, keys: range) -> bool | None:
        answers = {part.visibility(queries, keys) for part in self.parts}
        return True if True in answers else None if None in answers else False


def as_mask(value: Any) -> Mask:
    """Return a description as it is, and a bool array (or nested lists) as one.

    Raises:
        TypeError: `value` is neither.
    """
    if isinstance(value, Mask):
        return value
    if not isinstance(value, (list, tuple)) and not hasattr(value, "dtype"):
        raise TypeError(f"a mask must be an attn_bridge.masks description or a bool array, got {type(value).__name__}")
    return ArrayMask(value)


@dataclass(frozen=True)
class Band:
    """Query ``i`` sees the keys up to ``i + offset``, the last `size` of them or, if that is None, all."""

    offset: int = 0
    size: int | None = None

    def _joined(self, other: Band) -> Band | None:
        if self.offset != other.offset:
            return None
        return Band(self.offset, min((one.size for one in (self, other) if one.size is not None), default=None))


_CAUSAL_BAND = Band()


def as_band(mask: Mask) -> tuple[Band, tuple[ArrayMask, ...]] | None:
    """Return the band and the arrays whose ``&`` a mask is; None if it is anything else.

    Kernels that know bands take them as two numbers, and compute no array of positions.
    """
    if isinstance(mask, _Causal):
        return _CAUSAL_BAND, ()
    parts = _parts(mask, _All)
    arrays = tuple(part for part in parts if isinstance(part, ArrayMask))
    bands = [_band(part) for part in parts if not isinstance(part, (ArrayMask, _Full))]
    band = functools.reduce(lambda one, two: one and two and one._joined(two), bands) if bands else None
    return None if band is None else (band, arrays)


def _band(mask: Mask) -> Band | None:
    if isinstance(mask, _Causal):
        return _CAUSAL_BAND
    if isinstance(mask, _SlidingWindow):
        return Band(0, mask.size)
    if isinstance(mask, _Offset):
        inner = _band(mask.mask)
        return inner and Band(inner.offset + mask.n, inner.size)
    return None


def _parts(mask: Mask, kind: type[_Combined]) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    return operator.index(value)


def full() -> Mask:
    """Every query sees every key."""
    return _Full()


def causal() -> Mask:
    """Query ``i`` sees keys ``0..i``."""
    return _Causal()


def sliding_window(size: int) -> Mask:
    """Query ``i`` sees the last `size` keys up to and including its own: ``i - size < key <= i``.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1 (a window of 1 is the token itself).
    """
    size = _integer("size", size)
    if size < 1:
        raise ValueError(f"size ({size}) must be at least 1")
    return _SlidingWindow(size)
