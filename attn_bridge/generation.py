"""Options for drawing tokens, and their checks: shared by both backends' `generate`."""

from __future__ import annotations

import dataclasses
import sys
import warnings

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
    """The number of tokens to draw, and the sampling options.

    Attributes:
        max_new_tokens: number of tokens.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: draw from this many of the likeliest tokens; None is all.
        top_p: draw from the fewest likeliest whose probabilities add up to this; None is all.
        eos: a row that has drawn this token repeats it from there on; None for no end token.
    """

    max_new_tokens: int
    temperature: float | None = 0.0
    top_k: int | None = None
    top_p: float | None = None
    eos: int | None = None

    def checked(self, vocab_size: int) -> Options:
        """Check every value; return them as Python numbers, and None for options without effect.

        The temperature is None if the likeliest token is taken. Which options are None determines the computation;
        their values may be traced, so that one compiled program serves all of them.

        Raises:
            TypeError: a value is not a number, or not a whole number.
            ValueError: a value is out of range, such as a token not below `vocab_size`.
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
    """Return the options of a call after a check of the number of tokens; the rest is checked on use.

    Raises:
        TypeError: the number of tokens is not an integer.
        ValueError: it is below 1.
    """
    check_max_new_tokens(max_new_tokens)
    assert max_new_tokens is not None, "None is no integer"
    return Options(max_new_tokens, temperature, top_k, top_p, eos)


def check_length(tokens: int, new: int, num_positions: int | None) -> None:
    """Check that a table has a position for every token that is read, which the last new token is not.

    Args:
        tokens: of the longest row, without padding.
        new: number of new tokens.
        num_positions: size of the table; None without a table.

    Raises:
        ValueError: the table is too short.
    """
    if num_positions is not None and tokens + new > num_positions + 1:
        raise ValueError(
            f"tokens ({tokens}) and max_new_tokens ({new}) must be at most num_positions + 1 ({num_positions + 1})"
        )


def check_padding(shape: tuple[int, ...], dtype: str, mask: np.ndarray, wanted: tuple[int, int]) -> None:
    """Check the mask of a prompt: all padding is on the left, and every row has a token.

    Raises:
        TypeError: it is not bool.
        ValueError: its shape is not `wanted`, the ``(B, T)`` of the tokens, or a row has padding after a token, or no
            token.
    """
    if dtype != "bool":
        raise TypeError(f"attention_mask must be bool, got {dtype}")
    if tuple(shape) != wanted:
        raise ValueError(f"attention_mask must have the shape of tokens {wanted}, got {tuple(shape)}")
    for row, tokens in enumerate(mask):
        if not tokens[-1] or (tokens[:-1] & ~tokens[1:]).any():
            raise ValueError(
                f"attention_mask of row {row} must hide padding on the left alone, and show the last token"
            )
