"""Masks that depend on positions alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .description import Bools, Interval, Mask, Positions, as_mask, integer

# Positions are int32 in JAX, unless jax_enable_x64 is set.
_LARGEST = 2**31 - 1


# Half of int64's range: offsets and positions can be added to it without overflow.
_FAR = 2**62
"""A position beyond all keys."""


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return (query_positions == query_positions) | (key_positions == key_positions)  # all True, of the full shape

    def visibility(self, queries: range, keys: range) -> bool | None:
        return True

    def interval(self, queries: np.ndarray) -> Interval | None:
        return queries * 0, queries * 0 + _FAR

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        return self

    def restrict(self, other: object) -> Mask:
        return self if other is None else as_mask(other)


@dataclass(frozen=True)
class Causal(Mask):
    """Keys up to the query."""

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return key_positions <= query_positions

    def visibility(self, queries: range, keys: range) -> bool | None:
        return True if keys[-1] <= queries[0] else False if keys[0] > queries[-1] else None

    def interval(self, queries: np.ndarray) -> Interval | None:
        return queries * 0, queries + 1


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """The last `size` keys up to the query."""

    size: int

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        distance = query_positions - key_positions
        return (distance >= 0) & (distance < self.size)

    def visibility(self, queries: range, keys: range) -> bool | None:
        nearest, farthest = queries[0] - keys[-1], queries[-1] - keys[0]
        if farthest < 0 or nearest >= self.size:
            return False
        return True if nearest >= 0 and farthest < self.size else None

    def interval(self, queries: np.ndarray) -> Interval | None:
        return queries - self.size + 1, queries + 1

    def first_key(self, query: int) -> int:
        return max(0, query - self.size + 1)

    @property
    def reach(self) -> int | None:
        return self.size


@dataclass(frozen=True)
class Chunked(Mask):
    """Keys up to the query in the query's own chunk."""

    size: int

    @property
    def counts_tokens(self) -> bool:
        return True

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return (key_positions <= query_positions) & (key_positions // self.size == query_positions // self.size)

    def visibility(self, queries: range, keys: range) -> bool | None:
        first, last = queries[0] // self.size, queries[-1] // self.size
        if keys[0] > queries[-1] or keys[-1] // self.size < first or keys[0] // self.size > last:
            return False
        one_chunk = keys[0] // self.size == first == last
        return True if one_chunk and keys[-1] <= queries[0] else None

    def interval(self, queries: np.ndarray) -> Interval | None:
        return queries - queries % self.size, queries + 1  # what torch.compile makes of `//` and `*` is wrong

    def first_key(self, query: int) -> int:
        return query // self.size * self.size

    @property
    def reach(self) -> int | None:
        return self.size


@dataclass(frozen=True)
class Prefix(Mask):
    """Keys up to the query, and the first `size`."""

    size: int

    @property
    def counts_tokens(self) -> bool:
        return True

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return (key_positions <= query_positions) | (key_positions < self.size)

    def visibility(self, queries: range, keys: range) -> bool | None:
        if keys[-1] < self.size or keys[-1] <= queries[0]:
            return True
        return False if keys[0] > max(queries[-1], self.size - 1) else None

    def interval(self, queries: np.ndarray) -> Interval | None:
        return queries * 0, (queries + 1).clip(self.size)


def full() -> Mask:
    """Every query sees every key."""
    return Full()


def causal() -> Mask:
    """Query ``i`` sees keys ``0..i``.

    Example:
        >>> at = np.arange(4)
        >>> causal().allowed(at[:, None], at).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    return Causal()


def sliding_window(size: int) -> Mask:
    """Query ``i`` sees the last `size` keys up to and including its own: ``i - size < key <= i``.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1 (a window of 1 is the token itself).

    Example:
        >>> at = np.arange(4)
        >>> sliding_window(2).allowed(at[:, None], at).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
    """
    return SlidingWindow(positive("size", size))


def chunked(size: int) -> Mask:
    """Query ``i`` sees the keys in its chunk of `size` up to its position: ``i // size * size <= key <= i`` (Llama 4).

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1.

    Example:
        >>> at = np.arange(4)
        >>> chunked(2).allowed(at[:, None], at).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 1, 1]])
    """
    return Chunked(positive("size", size))


def prefix(size: int) -> Mask:
    """Query ``i`` sees keys ``0..i``, and everyone sees the first `size` keys ("prefix LM", arXiv 1910.10683).

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1.

    Example:
        >>> at = np.arange(4)
        >>> prefix(2).allowed(at[:, None], at).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    return Prefix(positive("size", size))


def positive(name: str, value: object) -> int:
    """Return a number of tokens; its name is for the error."""
    return _at_least(1, name, value)


def at_least_zero(name: str, value: object) -> int:
    """Return a number of tokens that may be 0; its name is for the error."""
    return _at_least(0, name, value)


def _at_least(least: int, name: str, value: object) -> int:
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name} ({number}) must be at least {least}")
    if number > _LARGEST:
        raise ValueError(f"{name} ({number}) must be at most {_LARGEST}, as positions have 32 bits")
    return number
