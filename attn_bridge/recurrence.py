"""Shared by variants that keep a state instead of keys, in both backends: their forms, masks and caches.

Letters: B batch, T tokens of the call, S tokens with those that the state has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .validation import Shape, check_implementation, check_integer, is_one_of, show

Form = Literal["chunked", "recurrent"]

FORMS: tuple[Form, ...] = ("chunked", "recurrent")
"""``chunked`` computes many tokens at once, ``recurrent`` one after the other; the numbers are the same."""

# One core, 8 heads of 64, 2,048 tokens, gated delta rule: 62, 76, 101, 192 and 1,970 ms by chunks of 16, 32, 64, 128
# and 256 tokens; of Mamba-2 71, 64, 64, 108 and 429. Longer chunks make fewer steps, one after the other.
CHUNK_SIZE = 64
"""Tokens of a chunk: within one, work grows with the square of their number."""

# Two idle cores, Kimi Delta Attention's rule, 8 heads of 64, 4 rows of 512 tokens, by chunks of 4, 8, 16 and 32: torch
# 69, 87, 184 and 341 ms, with gradients 246, 274, 476 and 846; JAX 55, 80, 144 and 267, with gradients 193, 202, 309
# and 530. One row in torch: 22, 21, 34 and 87, with gradients 71, 57, 93 and 220. Mamba (512 channels of 16, 2,048
# tokens, one core) takes 347, 365, 538 and 711.
CHANNEL_CHUNK_SIZE = 8
"""Tokens of a chunk if every channel has a separate decay: a chunk holds a decay per channel and pair of tokens."""


def choose_form(form: str | None, tokens: int, chunk_size: int = CHUNK_SIZE) -> Form:
    """Return the form for `tokens` tokens: the requested one, else chunks unless there is a single token.

    Raises:
        ValueError: an unknown form, or a chunk without tokens.
    """
    if form is not None and form not in FORMS:
        raise ValueError(f"form ({form!r}) must be one of {', '.join(map(repr, FORMS))} or None")
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be at least 1")
    if form is not None:
        return "chunked" if form == "chunked" else "recurrent"
    # A program for several sizes has a symbol or, in `torch.jit.trace`, a tensor for their number.
    return "recurrent" if isinstance(tokens, int) and tokens == 1 else "chunked"


def check_form(implementation: str | None) -> str | None:
    """Return the form that a constructor is given as its implementation.

    Raises:
        ValueError: another name, such as that of a kernel for attention to keys.
    """
    check_implementation(implementation, FORMS)
    return implementation


def check_token_mask(shape: Shape, dtype: str, batch: int, tokens: int, longest: int | None = None) -> None:
    """Check the mask of a variant whose tokens are read once, in order: it selects the tokens that count at all.

    Args:
        shape: ``(B, S)`` or ``(B, 1, 1, S)``.
        dtype: name of its dtype.
        batch: B.
        tokens: T; S is at least that.
        longest: the most that S may be; None takes T.

    Raises:
        TypeError: `dtype` is not bool.
        ValueError: another shape; all queries must see the same tokens.
    """
    if dtype != "bool":
        raise TypeError(f"attention mask must have dtype bool (True = may be attended), got {dtype}")
    longest = tokens if longest is None else longest
    seen = f"{tokens}" if longest == tokens else f"{tokens} to {longest}"
    bare = (shape[0], shape[3]) if len(shape) == 4 and tuple(shape[1:3]) == (1, 1) else tuple(shape)
    if len(bare) != 2 or not is_one_of(bare[0], (1, batch)) or not tokens <= bare[1] <= longest:
        raise ValueError(
            f"attention mask {show(shape)} must have shape (B, S) = ({batch}, {seen}): "
            "a state shows every query the same tokens"
        )


def check_recurrence(shapes: Sequence[Shape], state: Shape | None, *, by_channel: bool = False) -> None:
    """Check the shapes of query, key, value, log decay and, of the delta rule, beta, and that of the state.

    Args:
        shapes: in that order.
        state: shape of the state; None means zeros.
        by_channel: whether the log decay may be ``(B, T, H, D)``, too: a decay per channel of the key.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    query, key, value, *gates = shapes
    for name, shape in zip(("query", "key", "value"), shapes, strict=False):
        if len(shape) != 4:
            raise ValueError(f"{name} must have shape (B, T, H, D), got {show(shape)}")
    if query != key:
        raise ValueError(f"query {show(query)} and key {show(key)} must have one shape")
    if key[:2] != value[:2]:
        raise ValueError(f"key {show(key)} and value {show(value)} must agree in batch and length")
    if key[2] < 1 or value[2] % key[2]:
        raise ValueError(f"heads of value ({value[2]}) must be a multiple of the heads of key ({key[2]})")
    for name, shape in zip(("log_decay", "beta"), gates, strict=False):
        per_channel = by_channel and name == "log_decay" and shape == (*value[:3], key[3])
        if shape != value[:3] and not per_channel:
            raise ValueError(f"{name} {show(shape)} must have shape (B, T, H) = {show(value[:3])}")
    check_state(state, (value[0], value[2], key[3], value[3]))


def check_state(state: Shape | None, expected: Shape) -> None:
    """Check the shape of a state; None is a state of zeros.

    Raises:
        ValueError: another shape.
    """
    if state is not None and state != expected:
        raise ValueError(f"state {show(state)} must have shape (B, H, D, Dv) = {show(expected)}")


def check_states(state: Shape, conv_state: Shape | None, shapes: tuple[Shape, Shape | None]) -> None:
    """Check the states of a cache, ``(B, H, D, Dv)`` and ``(B, K - 1, C)``, against the `shapes` of a layer without B.

    Raises:
        ValueError: a layer of another kind, or of other sizes, made the cache.
    """
    of_cache = (state[1:], None if conv_state is None else conv_state[1:])
    if of_cache != shapes:
        got, expected = (
            " and ".join(show(shape) for shape in pair if shape is not None) for pair in (of_cache, shapes)
        )
        raise ValueError(f"cache must be what init_cache of the module returns: rows of {expected}, got {got}")


def check_trim(length: int, tokens: int) -> None:
    """Check the length to which a state is to be trimmed.

    Raises:
        TypeError: `length` is not an integer.
        ValueError: neither 0 nor the number of tokens so far.
    """
    check_integer("length", length)
    if not is_one_of(length, (0, tokens)):
        raise ValueError(f"length ({length}) must be 0 or {tokens}: a state does not tell what it was before")
