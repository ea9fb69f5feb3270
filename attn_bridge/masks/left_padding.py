"""Padding in front of sequences, as a mask ``(B, S)`` has it: positions and some masks count the tokens behind it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from .description import AllOf, ArrayMask, Bools, Integers, Mask, parts_of


def left_padding(mask: Mask) -> Integers:
    """Return how many keys a mask's bool arrays ``(B, S)`` hide in front of the first that they show, ``(B, 1)``.

    None for a mask without such arrays, alone or joined to others by ``&``.
    """
    tokens = _padding(mask)
    # As long as the sum is 0, no token has been shown.
    return None if tokens is None else (tokens.cumsum(-1) == 0).sum(-1)[:, None]


def counting_tokens(mask: Mask, may_hide: Callable[[Bools], bool]) -> Mask:
    """Return a mask whose parts count each sequence from its first token, not from the padding in front of it.

    Args:
        mask: with bool arrays of one library.
        may_hide: returns whether an array ``(B,)`` may have a False.
    """
    if not mask.counts_tokens:
        return mask
    tokens = _padding(mask)
    if tokens is None or not may_hide(tokens[:, 0]):
        return mask
    return mask.behind(left_padding(ArrayMask(tokens))[:, None, None])


def _padding(mask: Mask) -> Bools | None:
    """Return the tokens ``(B, S)`` that all padding masks show; None without any."""
    parts = parts_of(mask, AllOf)
    arrays = [part.array for part in parts if isinstance(part, ArrayMask) and part.array.ndim == 2]
    return functools.reduce(operator.and_, arrays) if arrays else None
