"""Who attends to whom, described once for both backends.

A mask answers ``mask.allowed(query_positions, key_positions)`` with bool arrays, ``True`` = may attend. It uses only
comparisons and logic, so it works on the index arrays of NumPy, torch and JAX alike. Masks combine with ``&`` and
``|``, also with a bool array of shape ``(B, S)`` or broadcastable to ``(B, H, T, S)``; ``mask.offset(n)`` is the same
mask seen by queries that start at position ``n``. Positions are the places in the sequence, padding included.

Without an offset, query ``i`` is position ``i`` whatever the number of keys: ``causal()`` shows it keys ``0..i``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import validation

__all__ = [
    "ArrayMask",
    "Band",
    "Mask",
    "Pieces",
    "as_band",
    "as_mask",
    "as_pieces",
    "causal",
    "chunked",
    "documents",
    "full",
    "padding",
    "prefix",
    "sliding_window",
]

_LARGEST = 2**31 - 1

_FAR = 2**62
"""A position beyond all keys."""


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

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the first key that each query sees, and the one after the last; None if one sees not all in between.

        Known without arrays. Keys may lie on either side of those that there are, and the last before the first.

        Args:
            queries: positions ``(T,)``.
        """
        return None

    def first_key(self, query: int) -> int:
        """Return a position before which no query from position `query` on sees a key; 0 if there is no such bound."""
        return 0

    @property
    def reach(self) -> int | None:
        """Number of last keys, its own included, that a query sees at most; None if there is no such bound."""
        return None

    def placed(self, queries: int, keys: int) -> Mask:
        """Return this mask for exactly so many queries and keys, from position 0 each.

        What its arrays hold then has the axes ``(B, H, T, S)``, each whole or 1, so that a kernel takes it in blocks.
        """
        return self

    def check_arrays(self, check: Callable[[Any], None]) -> None:
        """Call `check` with every bool array inside the description; other arrays were checked when it was made."""

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        """Check that what the description holds per sequence, and per token, is for so many of them at least.

        Args:
            batch: sequences; what is held for one is for all.
            tokens: queries and keys together, those in a cache included; 0 leaves that to `placed`.

        Raises:
            ValueError: it is not.
        """

    def arrays(self) -> Iterator[Any]:
        """Yield the arrays inside the description, for a backend to place on its device."""
        return iter(())

    def with_arrays(self, convert: Callable[[Any], Any]) -> Mask:
        """Return the same description with every array replaced by ``convert(array)``."""
        return self

    def separate(self) -> tuple[Mask, tuple[Any, ...]]:
        """Return a description with a numbered place for each array, equal by value, and the arrays.

        A compiler takes the first as known and the second as data; ``with_arrays`` brings them together again.
        """
        counter = itertools.count()
        return self.with_arrays(lambda _: _Place(next(counter))), tuple(self.arrays())

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        """Return this mask for queries that start at position `n` (decoding after `n` cached tokens).

        Args:
            n: position of the first query.
            keys: position of the first key, where keys that nobody sees are left out.
        """
        return _Offset(self, _integer("n", n), _integer("keys", keys))

    def picked(self, keys: Any) -> Mask:
        """Return this mask with the columns of its bool arrays picked: those of the keys at these positions ``(S,)``.

        Its ``allowed(query_positions, keys)`` then is about these keys, in any order.
        """
        return self

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

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        return np.zeros_like(queries), np.full_like(queries, _FAR)


@dataclass(frozen=True)
class _Causal(Mask):
    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return key_positions <= query_positions

    def visibility(self, queries: range, keys: range) -> bool | None:
        return True if keys[-1] <= queries[0] else False if keys[0] > queries[-1] else None

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        return np.zeros_like(queries), queries + 1


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

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        return queries - self.size + 1, queries + 1

    def first_key(self, query: int) -> int:
        return max(0, query - self.size + 1)

    @property
    def reach(self) -> int | None:
        return self.size


@dataclass(frozen=True)
class _Chunked(Mask):
    size: int

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return (key_positions <= query_positions) & (key_positions // self.size == query_positions // self.size)

    def visibility(self, queries: range, keys: range) -> bool | None:
        first, last = queries[0] // self.size, queries[-1] // self.size
        if keys[0] > queries[-1] or keys[-1] // self.size < first or keys[0] // self.size > last:
            return False
        one_chunk = keys[0] // self.size == first == last
        return True if one_chunk and keys[-1] <= queries[0] else None

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        return queries // self.size * self.size, queries + 1

    def first_key(self, query: int) -> int:
        return query // self.size * self.size

    @property
    def reach(self) -> int | None:
        return self.size


@dataclass(frozen=True)
class _Prefix(Mask):
    size: int

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return (key_positions <= query_positions) | (key_positions < self.size)

    def visibility(self, queries: range, keys: range) -> bool | None:
        if keys[-1] < self.size or keys[-1] <= queries[0]:
            return True
        return False if keys[0] > max(queries[-1], self.size - 1) else None

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        return np.zeros_like(queries), np.maximum(queries + 1, self.size)


@dataclass(frozen=True)
class _Place:
    """Stands for an array in a description that was separated from its arrays."""

    number: int


@dataclass(frozen=True, eq=False)
class _OfArrays(Mask):
    """Base of the masks of one field or two that hold arrays; equal by identity, by value where places stand in."""

    @property
    def _held(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __eq__(self, other: object) -> bool:
        if type(self) is type(other) and isinstance(other, _OfArrays) and isinstance(self._held[0], _Place):
            return isinstance(other._held[0], _Place) and self._held == other._held
        return self is other

    def __hash__(self) -> int:
        return hash(self._held) if isinstance(self._held[0], _Place) else id(self)

    def arrays(self) -> Iterator[Any]:
        """Yield what it holds."""
        yield from self._held

    def with_arrays(self, convert: Callable[[Any], Any]) -> Mask:
        """Return the mask of the converted arrays."""
        return type(self)(*map(convert, self._held))


@dataclass(frozen=True, eq=False)
class ArrayMask(_OfArrays):
    """A bool array given by the user: ``(B, S)`` for padding, or broadcastable to ``(B, H, T, S)``."""

    array: Any

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        """Return the array with the axes of heads and queries added where it is ``(B, S)``."""
        return self.array[:, None, None, :] if self.array.ndim == 2 else self.array

    def check_arrays(self, check: Callable[[Any], None]) -> None:
        """Check the array."""
        check(self.array)

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        """Return the mask itself, without its first `keys` columns: its rows are the queries at hand."""
        return self if keys == 0 or self._is_one_column() else ArrayMask(self.array[..., keys:])

    def picked(self, keys: Any) -> Mask:
        """Return the mask of the columns of these keys."""
        return self if self._is_one_column() else ArrayMask(self.array[..., keys])

    def _is_one_column(self) -> bool:
        return bool(self.array.ndim == 0 or self.array.shape[-1] == 1)


@dataclass(frozen=True, eq=False)
class _Padding(_OfArrays):
    """Numbers of tokens, as ``(B, 1, 1, 1)``."""

    lengths: Any

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return key_positions < self.lengths

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        return super().offset(n, keys=keys) if keys else self

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        validation.check_mask_rows("lengths of masks.padding", self.lengths.shape[0], batch)


@dataclass(frozen=True, eq=False)
class _Documents(_OfArrays):
    """Numbers of documents, ``(B, S)`` or ``(1, S)``."""

    ids: Any

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return (self.ids[:, query_positions] == self.ids[:, key_positions])[:, None]

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        validation.check_mask_rows("rows of masks.documents", self.ids.shape[0], batch)
        if self.ids.shape[1] < tokens:
            raise ValueError(f"ids ({self.ids.shape[1]}) must be one per token, got keys up to {int(tokens)}")

    def placed(self, queries: int, keys: int) -> Mask:
        return self._placed(slice(0, queries), slice(0, keys))

    def _placed(self, queries: slice, keys: slice) -> Mask:
        # Slices and not ranges: torch.compile would take the ends of a range as constants.
        rows, columns = self.ids[:, queries], self.ids[:, keys]
        for name, one, wanted in (("queries", rows, queries), ("keys", columns, keys)):
            if one.shape[1] != wanted.stop - wanted.start:
                raise ValueError(f"ids ({self.ids.shape[1]}) must be one per token, got {name} up to {wanted.stop}")
        return _Equal(rows[:, None, :, None], columns[:, None, None, :])


@dataclass(frozen=True, eq=False)
class _Equal(_OfArrays):
    """Numbers of the queries ``(B, 1, T, 1)`` and of the keys ``(B, 1, 1, S)``, which must be equal."""

    of_queries: Any
    of_keys: Any

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return self.of_queries == self.of_keys


@dataclass(frozen=True)
class _Offset(Mask):
    mask: Mask
    n: int
    keys: int = 0

    def arrays(self) -> Iterator[Any]:
        return self.mask.arrays()

    def check_arrays(self, check: Callable[[Any], None]) -> None:
        self.mask.check_arrays(check)

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        self.mask.check_sizes(batch, tokens and tokens + max(self.n, self.keys))

    def with_arrays(self, convert: Callable[[Any], Any]) -> Mask:
        return _Offset(self.mask.with_arrays(convert), self.n, self.keys)

    def placed(self, queries: int, keys: int) -> Mask:
        if isinstance(self.mask, _Documents):
            return self.mask._placed(slice(self.n, self.n + queries), slice(self.keys, self.keys + keys))
        return self

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        return self.mask.offset(self.n + n, keys=self.keys + keys)

    def allowed(self, query_positions: Any, key_positions: Any) -> Any:
        return self.mask.allowed(query_positions + self.n, key_positions + self.keys if self.keys else key_positions)

    def visibility(self, queries: range, keys: range) -> bool | None:
        queries = range(queries.start + self.n, queries.stop + self.n)
        return self.mask.visibility(queries, range(keys.start + self.keys, keys.stop + self.keys))

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        found = self.mask.interval(queries + self.n)
        return found and (found[0] - self.keys, found[1] - self.keys)

    def first_key(self, query: int) -> int:
        return max(0, self.mask.first_key(query + self.n) - self.keys)


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

    def check_arrays(self, check: Callable[[Any], None]) -> None:
        for part in self.parts:
            part.check_arrays(check)

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        for part in self.parts:
            part.check_sizes(batch, tokens)

    def placed(self, queries: int, keys: int) -> Mask:
        return type(self)(tuple(part.placed(queries, keys) for part in self.parts))

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        return type(self)(tuple(part.offset(n, keys=keys) for part in self.parts))

    def picked(self, keys: Any) -> Mask:
        return type(self)(tuple(part.picked(keys) for part in self.parts))

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

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        found = [part.interval(queries) for part in self.parts]
        if None in found:
            return None
        starts, ends = zip(*found, strict=True)
        return np.maximum.reduce(starts), np.minimum.reduce(ends)

    def first_key(self, query: int) -> int:
        return max(part.first_key(query) for part in self.parts)

    @property
    def reach(self) -> int | None:
        return min((part.reach for part in self.parts if part.reach is not None), default=None)


@dataclass(frozen=True)
class _Any(_Combined):
    @staticmethod
    def _combine(one: Any, two: Any) -> Any:
        return one | two

    def visibility(self, queries: range, keys: range) -> bool | None:
        answers = {part.visibility(queries, keys) for part in self.parts}
        return True if True in answers else None if None in answers else False

    def interval(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        found = [part.interval(queries) for part in self.parts]
        return None if None in found else functools.reduce(_union, found)

    def first_key(self, query: int) -> int:
        return min(part.first_key(query) for part in self.parts)

    @property
    def reach(self) -> int | None:
        reaches = [part.reach for part in self.parts]
        return None if None in reaches else max(reach for reach in reaches if reach is not None)


def _union(one: Any, two: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the intervals that pairs of them make together; None where some lie apart."""
    if one is None:
        return None
    (start, end), (other_start, other_end) = one, two
    is_empty, other_is_empty = start >= end, other_start >= other_end
    if not np.all(is_empty | other_is_empty | ((start <= other_end) & (other_start <= end))):
        return None
    starts = np.where(is_empty, other_start, np.where(other_is_empty, start, np.minimum(start, other_start)))
    ends = np.where(is_empty, other_end, np.where(other_is_empty, end, np.maximum(end, other_end)))
    return starts, ends


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


class Pieces(NamedTuple):
    """What a mask is the ``&`` of."""

    plain: Mask | None
    """What has no arrays, None if it restricts nothing."""

    arrays: tuple[Mask, ...]
    """Arrays, and paddings by numbers of tokens."""

    documents: Mask | None
    """Numbers of the queries ``(B, 1, T, 1)`` and of the keys ``(B, 1, 1, S)``, each for one sequence or all."""


def as_pieces(mask: Mask) -> Pieces | None:
    """Return what a mask is the ``&`` of; None where arrays are otherwise combined, and for documents of two kinds."""
    parts = [part for part in _parts(mask, _All) if not isinstance(part, _Full)]
    arrays = tuple(part for part in parts if isinstance(part, (ArrayMask, _Padding)))
    documents = [part for part in parts if isinstance(part, _Equal)]
    plain = [part for part in parts if part not in arrays and part not in documents]
    if len(documents) > 1 or any(True for part in plain for _ in part.arrays()):
        return None
    together = functools.reduce(Mask.restrict, plain) if plain else None
    return Pieces(together, arrays, documents[0] if documents else None)


def _band(mask: Mask) -> Band | None:
    if isinstance(mask, _Causal):
        return _CAUSAL_BAND
    if isinstance(mask, _SlidingWindow):
        return Band(0, mask.size)
    if isinstance(mask, _Offset):
        inner = _band(mask.mask)
        return inner and Band(inner.offset + mask.n - mask.keys, inner.size)
    return None


def _parts(mask: Mask, kind: type[_Combined]) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)


def _integer(name: str, value: Any) -> int:
    if type(value) is int:
        return value  # torch.compile knows the type of its symbols, and nothing of `hasattr`
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    return int(operator.index(value))


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
    return _SlidingWindow(_positive("size", size))


def chunked(size: int) -> Mask:
    """Query ``i`` sees the keys of its own chunk of `size` up to its own: ``i // size * size <= key <= i`` (Llama 4).

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1.
    """
    return _Chunked(_positive("size", size))


def prefix(size: int) -> Mask:
    """Query ``i`` sees keys ``0..i``, and everyone sees the first `size` keys ("prefix LM", arXiv 1910.10683).

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1.
    """
    return _Prefix(_positive("size", size))


def padding(lengths: Any) -> Mask:
    """Everyone sees the first ``lengths[b]`` keys of sequence ``b``; the rest is padding on the right.

    Args:
        lengths: integers ``(B,)``, an array of any backend or a list.

    Raises:
        TypeError: `lengths` are not integers.
        ValueError: `lengths` have not one axis, or one of a list or a NumPy array is negative.
    """
    lengths = _integers("lengths", lengths)
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have shape (B,), got {tuple(lengths.shape)}")
    if isinstance(lengths, np.ndarray) and lengths.size and lengths.min() < 0:
        raise ValueError(f"lengths ({int(lengths.min())} among them) must be at least 0")
    return _Padding(lengths[:, None, None, None])


def documents(ids: Any) -> Mask:
    """Tokens see each other within a document: where their `ids` are equal.

    Args:
        ids: integers ``(B, S)`` or ``(S,)``, one per token, also of those in a cache; an array of any backend or lists.

    Raises:
        TypeError: `ids` are not integers.
        ValueError: `ids` have neither one axis nor two.
    """
    ids = _integers("ids", ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"ids must have shape (B, S) or (S,), got {tuple(ids.shape)}")
    return _Documents(ids[None] if ids.ndim == 1 else ids)


def _positive(name: str, value: Any) -> int:
    number = _integer(name, value)
    if number < 1:
        raise ValueError(f"{name} ({number}) must be at least 1")
    if number > _LARGEST:
        raise ValueError(f"{name} ({number}) must be at most {_LARGEST}, as positions have 32 bits")
    return number


def _integers(name: str, value: Any) -> Any:
    array = value if hasattr(value, "dtype") else np.asarray(value)
    dtype = str(array.dtype).rpartition(".")[2]
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    return array
