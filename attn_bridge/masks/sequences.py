"""Masks of data per sequence: the number of its tokens, and the document of each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import validation
from .description import Bools, Integers, Mask, OfArrays, Positions


@dataclass(frozen=True, eq=False)
class Padding(OfArrays):
    """Numbers of tokens, as ``(B, 1, 1, 1)``."""

    lengths: Integers

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return key_positions < self.lengths

    def offset(self, n: int, *, keys: int = 0) -> Mask:
        return super().offset(n, keys=keys) if keys else self

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        validation.check_mask_rows("lengths of masks.padding", self.lengths.shape[0], batch)


@dataclass(frozen=True, eq=False)
class Documents(OfArrays):
    """Numbers of documents, ``(B, S)`` or ``(1, S)``."""

    ids: Integers

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return (self.ids[:, query_positions] == self.ids[:, key_positions])[:, None]

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        validation.check_mask_rows("rows of masks.documents", self.ids.shape[0], batch)
        if self.ids.shape[1] < tokens:
            raise ValueError(f"ids ({self.ids.shape[1]}) must be one per token, got keys up to {int(tokens)}")

    def placed(self, queries: int, keys: int) -> Mask:
        return self.placed_at(slice(0, queries), slice(0, keys))

    def placed_at(self, queries: slice, keys: slice) -> Mask:
        """Return the mask between the documents of some queries and keys; refuse positions past the last id."""
        # Slices and not ranges: torch.compile would take the ends of a range as constants.
        rows, columns = self.ids[:, queries], self.ids[:, keys]
        for name, ids, wanted in (("queries", rows, queries), ("keys", columns, keys)):
            if ids.shape[1] != wanted.stop - wanted.start:
                raise ValueError(f"ids ({self.ids.shape[1]}) must be one per token, got {name} up to {wanted.stop}")
        return Equal(rows[:, None, :, None], columns[:, None, None, :])


@dataclass(frozen=True, eq=False)
class Equal(OfArrays):
    """Numbers of the queries ``(B, 1, T, 1)`` and of the keys ``(B, 1, 1, S)``, which must be equal."""

    of_queries: object
    of_keys: object

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return self.of_queries == self.of_keys


def padding(lengths: Integers) -> Mask:
    """Everyone sees the first ``lengths[b]`` keys of sequence ``b``; the rest is padding on the right.

    Args:
        lengths: integers ``(B,)``, an array of any backend or a list.

    Raises:
        TypeError: `lengths` are not integers.
        ValueError: `lengths` have not one axis, or one of a list or a NumPy array is negative.

    Example:
        >>> at = np.arange(4)
        >>> padding([4, 2]).allowed(at[:, None], at)[:, 0, 0].astype(int)
        array([[1, 1, 1, 1],
               [1, 1, 0, 0]])
    """
    lengths = _integers("lengths", lengths)
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have shape (B,), got {tuple(lengths.shape)}")
    if isinstance(lengths, np.ndarray) and lengths.size and lengths.min() < 0:
        raise ValueError(f"lengths ({int(lengths.min())} among them) must be at least 0")
    return Padding(lengths[:, None, None, None])


def documents(ids: Integers) -> Mask:
    """Tokens see each other within a document: where their `ids` are equal.

    Args:
        ids: integers ``(B, S)`` or ``(S,)``, one per token, also of those in a cache; an array of any backend or lists.

    Raises:
        TypeError: `ids` are not integers.
        ValueError: `ids` have neither one axis nor two.

    Example:
        >>> at = np.arange(4)
        >>> documents([[0, 0, 1, 1]]).allowed(at[:, None], at)[0, 0].astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 1],
               [0, 0, 1, 1]])
    """
    ids = _integers("ids", ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"ids must have shape (B, S) or (S,), got {tuple(ids.shape)}")
    ids = _in_32_bits(ids)
    return Documents(ids[None] if ids.ndim == 1 else ids)


def _in_32_bits(ids: Integers) -> Integers:
    """Return ids that JAX would cut to 32 bits as ranks, which are equal where the ids are; others unchanged."""
    if not isinstance(ids, np.ndarray) or ids.itemsize <= 4 or not ids.size:
        return ids
    if ids.min() >= -(2**31) and ids.max() < 2**31:
        return ids
    return np.unique(ids, return_inverse=True)[1].reshape(ids.shape)


def _integers(name: str, value: object) -> Integers:
    array = value if hasattr(value, "dtype") else np.asarray(value)
    dtype = str(array.dtype).rpartition(".")[2]
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    return array
