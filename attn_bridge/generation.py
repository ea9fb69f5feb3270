"""How tokens are drawn, and what of that is refused: what both backends' `generate` share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from .specs.model import check_max_new_tokens
from .validation import check_integer, check_number


@dataclasses.dataclass(frozen=True)
class Options:
    """How many tokens to draw, and how.

    Attributes:
        max_new_tokens: how many.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: draw from so many of the likeliest; None is all.
        top_p: draw from the fewest likeliest whose probabilities add up to this; None is all.
        eos: a row that has drawn this token holds nothing else from there on; None is no such token.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    eos: int | None = None

    def check(self, vocab_size: int) -> None:
        """Check every value.

        Raises:
            TypeError: one is no number, or no whole one.
            ValueError: one does not fit, such as a token that is none of `vocab_size`.
        """
        check_max_new_tokens(self.max_new_tokens)
        check_number("temperature", self.temperature)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature ({self.temperature}) must be at least 0 and finite")
        if self.top_k is not None:
            check_integer("top_k", self.top_k)
            if self.top_k < 1:
                raise ValueError(f"top_k ({self.top_k}) must be at least 1")
        if self.top_p is not None:
            check_number("top_p", self.top_p)
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p ({self.top_p}) must be above 0 and at most 1")
        if self.eos is not None:
            check_integer("eos", self.eos)
            if not 0 <= self.eos < vocab_size:
                raise ValueError(f"eos ({self.eos}) must be at least 0 and below vocab_size ({vocab_size})")


def check_room(given: int, new: int, positions: int) -> None:
    """Check that a decoder has positions for all tokens that it reads; the last new one it only writes.

    Raises:
        ValueError: it hasn't.
    """
    if given + new - 1 > positions:
        raise ValueError(
            f"tokens given ({given}) and new ones but the last ({new - 1}) must be at most num_positions of decoder "
            f"({positions})"
        )


def check_padding(shape: tuple[int, ...], dtype: str, mask: np.ndarray[Any, Any], tokens: int) -> None:
    """Check the mask of a prompt: padding stands on the left, and every row has a token.

    Raises:
        TypeError: it is not bool.
        ValueError: it is not ``(B, T)``, a row has padding behind a token, or no token.
    """
    if dtype != "bool":
        raise TypeError(f"attention_mask must be bool, got {dtype}")
    if len(shape) != 2 or shape[1] != tokens:
        raise ValueError(f"attention_mask must have the shape of tokens (B, {tokens}), got {tuple(shape)}")
    for row, shown in enumerate(mask):
        if not shown[-1] or (shown[:-1] & ~shown[1:]).any():
            raise ValueError(
                f"attention_mask of row {row} must hide padding on the left alone, and show the last token"
            )
