"""How tokens are drawn, and what of that is refused: what both backends' `generate` share."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import Any

import numpy as np

from .printable import printable
from .specs.model import check_max_new_tokens
from .validation import check_integer, check_number

COLDEST = 2.0**-100
"""The lowest temperature that is divided by: float32 would round lower ones to 0, and here logits that differ are
infinitely far apart already."""


def end_token(eos: int | None, eos_token_id: int | None) -> int | None:
    """Return the token that ends a row, given by either name.

    Raises:
        ValueError: the two differ.
    """
    if eos is not None and eos_token_id is not None and eos != eos_token_id:
        raise ValueError(f"eos ({eos}) and eos_token_id ({eos_token_id}) must be the same token")
    return eos_token_id if eos is None else eos


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
    temperature: float | None = 0.0
    top_k: int | None = None
    top_p: float | None = None
    eos: int | None = None

    def checked(self, vocab_size: int) -> Options:
        """Check every value; return them as Python's numbers, and None where an option changes nothing.

        The temperature is None where the likeliest token is taken. Which options are None decides what is computed;
        their values may be known later, so that one compiled program serves all of them.

        Raises:
            TypeError: one is no number, or no whole one.
            ValueError: one does not fit, such as a token that is none of `vocab_size`.
        """
        check_max_new_tokens(self.max_new_tokens)
        check_number("temperature", self.temperature)
        if not 0 <= (self.temperature or 0.0) <= sys.float_info.max:
            raise ValueError(f"temperature ({printable(self.temperature)}) must be at least 0 and finite")
        temperature = float(self.temperature or 0.0)
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
        narrowed = next((name for name in ("top_k", "top_p") if getattr(self, name) is not None), "")
        if narrowed and temperature == 0 and getattr(self, narrowed) != 1:
            warnings.warn(
                f"{narrowed} ({getattr(self, narrowed)}) changes nothing at temperature 0, which takes the likeliest "
                "token; give temperature=1.0 to draw",
                UserWarning,
                stacklevel=2,
            )
        return Options(
            int(self.max_new_tokens),
            max(temperature, COLDEST) if temperature > 0 else None,
            None if self.top_k is None or self.top_k >= vocab_size else int(self.top_k),
            None if self.top_p is None or self.top_p == 1 else float(self.top_p),
            None if self.eos is None else int(self.eos),
        )


def options_of(
    max_new_tokens: int | None, temperature: float, top_k: int | None, top_p: float | None, eos: int | None
) -> Options:
    """Return the options of a call, whose number of tokens is there; the rest is checked where they are used.

    Raises:
        TypeError: a number of tokens that is none.
        ValueError: one below 1.
    """
    check_max_new_tokens(max_new_tokens)
    assert max_new_tokens is not None, "None is no integer"
    return Options(max_new_tokens, temperature, top_k, top_p, eos)


def check_length(tokens: int, new: int, num_positions: int | None) -> None:
    """Check that a table has a position for every token that is read; the last new one is not.

    Args:
        tokens: of the longest row, without padding.
        new: how many follow.
        num_positions: size of the table; None is no table.

    Raises:
        ValueError: it has not.
    """
    if num_positions is not None and tokens + new > num_positions + 1:
        raise ValueError(
            f"tokens ({tokens}) and max_new_tokens ({new}) must be at most num_positions + 1 ({num_positions + 1})"
        )


def check_padding(shape: tuple[int, ...], dtype: str, mask: np.ndarray[Any, Any], wanted: tuple[int, int]) -> None:
    """Check the mask of a prompt: padding stands on the left, and every row has a token.

    Raises:
        TypeError: it is not bool.
        ValueError: it is not `wanted`, the ``(B, T)`` of the tokens, a row has padding behind a token, or no token.
    """
    if dtype != "bool":
        raise TypeError(f"attention_mask must be bool, got {dtype}")
    if tuple(shape) != wanted:
        raise ValueError(f"attention_mask must have the shape of tokens {wanted}, got {tuple(shape)}")
    for row, shown in enumerate(mask):
        if not shown[-1] or (shown[:-1] & ~shown[1:]).any():
            raise ValueError(
                f"attention_mask of row {row} must hide padding on the left alone, and show the last token"
            )
