"""Mistakes that shapes alone don't reveal: warnings, and advice for messages, the same in both backends.

Shapes are tuples of sizes, letters are those of `validation`; a mask is a NumPy array. Python shows a warning once.
"""

from __future__ import annotations

import warnings

import numpy as np

from .validation import Shape

MAX_HEADS = 128
"""The most heads of any published attention (DeepSeek V3): a larger number is probably that of tokens."""

USUAL_HEADS = frozenset(
    {*range(1, 17), *range(20, 65, 4), *range(72, MAX_HEADS + 1, 8), 18, 22, 25, 26, 30, 71}  # 25: GPT-2 XL, 71: Falcon
)
"""Numbers of heads that models have."""

LOOKS = 1000
"""Masks that are looked at in a process. A mistake is in the first of them, and a look makes a GPU wait."""

_looks_left = LOOKS


def check_alone(misplaced: tuple[object, ...]) -> None:
    """Check that a module is called with its input as the only positional argument.

    Raises:
        TypeError: it has other positional arguments, such as ``(query, key, value)``.
    """
    if misplaced:
        raise TypeError(
            f"x is the only argument by position, got {1 + len(misplaced)}: query, key and value are projected from x; "
            "give attention_mask=, context=, positions= or cache= by name"
        )


def warn_of_axes(query: Shape, key: Shape) -> None:
    """Warn of a ``(B, H, T, D)`` query: it has fewer tokens than heads, and a number of heads that no model has."""
    tokens, heads = query[1], query[2]
    if not isinstance(heads, int) or heads in USUAL_HEADS:  # first, as this ends nearly every call
        return
    if not all(isinstance(size, int) for size in (*query, *key)):  # of an export for any size
        return
    if heads == key[2] and 1 < tokens < heads and key[1] < heads:
        shape = tuple(int(size) for size in query)
        _warn(
            f"query {shape} is read as (B, T, H, D), {tokens} tokens of {heads} heads; swap axes 1 and 2 if it is "
            "(B, H, T, D)"
        )


def should_look() -> bool:
    """Return whether to give `warn_of_mask` another mask."""
    global _looks_left
    _looks_left -= 1
    return _looks_left >= 0


def warn_of_mask(mask: np.ndarray, scores_shape: Shape) -> None:
    """Warn of a bool mask ``(B, S)`` that is inverted, as far as it shows, or that is causal.

    Args:
        mask: with B and S of `scores_shape`, or 1.
        scores_shape: ``(B, H, T, S)``.
    """
    batch, _, queries, keys = scores_shape
    if 0 in mask.shape:
        return
    sees_any = mask.any(1)
    if not sees_any.all() and _is_inverted(mask[sees_any]):
        _warn(
            f"attention mask hides every key of sequence {int(sees_any.argmin())}: True = may be attended, where "
            "key_padding_mask of torch.nn has True for padding; give ~mask if yours has, too"
        )
    elif batch == queries == keys > 1 and mask.shape == (batch, keys) and _is_causal(mask):
        _warn(
            f"a mask of 2 dimensions {mask.shape} is (B, S), a row per sequence, and this one is causal; give a (T, S) "
            "mask as (1, 1, T, S): mask[None, None]"
        )


def _is_inverted(others: np.ndarray) -> bool:
    """Return whether the rows of a mask other than those that hide all keys show only the end, where padding is.

    A sequence that is all padding is valid next to others whose tokens come first. Padding on the left is mistaken for
    tokens only if no sequence is as long as the batch.
    """
    return bool(not others[:, 0].any() and (others[:, 1:] >= others[:, :-1]).all())


def _is_causal(mask: np.ndarray) -> bool:
    """Return whether the last key of each row is the diagonal's: lengths of padding seldom are 1, 2, 3, ..."""
    return bool(mask.diagonal().all() and not np.triu(mask, 1).any())


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
