"""Forms of a mask for kernels: a band and arrays, or an array-free mask, arrays, and documents."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from .blocks import BlockCausal
from .description import AllOf, ArrayMask, Mask, Offset, parts_of
from .positions import Causal, Chunked, Full, Prefix, SlidingWindow
from .sequences import Equal, Padding


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
    if isinstance(mask, Causal):
        return _CAUSAL_BAND, ()
    parts = parts_of(mask, AllOf)
    arrays = tuple(part for part in parts if isinstance(part, ArrayMask))
    bands = [_band(part) for part in parts if not isinstance(part, (ArrayMask, Full))]
    band = functools.reduce(lambda first, second: first and second and first._joined(second), bands) if bands else None
    return None if band is None else (band, arrays)


class Pieces(NamedTuple):
    """The parts whose ``&`` a mask is."""

    plain: Mask | None
    """The part without arrays, None if it restricts nothing."""

    arrays: tuple[Mask, ...]
    """Arrays, and padding by lengths."""

    documents: Mask | None
    """Numbers of the queries ``(B, 1, T, 1)`` and of the keys ``(B, 1, 1, S)``, each for one sequence or all."""


def as_pieces(mask: Mask) -> Pieces | None:
    """Return the parts whose ``&`` a mask is; None if arrays are combined otherwise, or for two kinds of documents."""
    parts = [part for part in parts_of(mask, AllOf) if not isinstance(part, Full)]
    arrays = tuple(part for part in parts if isinstance(part, (ArrayMask, Padding)))
    documents = [part for part in parts if isinstance(part, Equal)]
    plain = [part for part in parts if not isinstance(part, (ArrayMask, Padding, Equal))]
    if len(documents) > 1 or any(True for part in plain for _ in part.arrays()):
        return None
    together = functools.reduce(Mask.restrict, plain) if plain else None
    return Pieces(together, arrays, documents[0] if documents else None)


def goes_forward(mask: Mask) -> bool:
    """Return whether the kind of mask guarantees that visible keys are intervals that never move back."""
    mask = mask.mask if isinstance(mask, Offset) else mask
    parts = parts_of(mask, AllOf)
    if len(parts) > 1:
        return all(goes_forward(part) for part in parts)
    return isinstance(mask, (BlockCausal, Causal, Chunked, Full, Prefix, SlidingWindow))


def _band(mask: Mask) -> Band | None:
    if isinstance(mask, Causal):
        return _CAUSAL_BAND
    if isinstance(mask, SlidingWindow):
        return Band(0, mask.size)
    if isinstance(mask, Offset):
        inner = _band(mask.mask)
        # Query i is at position i + n, key j at position j + keys.
        return inner and Band(inner.offset + mask.n - mask.keys, inner.size)
    return None
