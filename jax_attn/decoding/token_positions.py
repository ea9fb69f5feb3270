"""The positions of new tokens: those given, or numbers that continue those in a cache.

The twin is `torch_attn.decoding.token_positions`. Letters: B batch, T new tokens, S tokens with those
in the cache, D width.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from attn_bridge import cache_validation, validation
from attn_bridge.masks import Mask, left_padding
from attn_bridge.specs import Rotary

from .. import functional
from . import running


def positions_of(
    x: Float[Array, "B T D"],
    positions: Int[Array, "... T"] | None = None,
    cache: Any = None,
    attention_mask: Mask | Bool[Array, "..."] | None = None,
    position: object = None,
) -> Int[Array, "... T"]:
    """Return the positions of the tokens of `x`: those given, or numbers that continue those in the cache.

    A row that is padded on the left counts from its first token, as without padding; its padding has position 0.

    Args:
        x: ``(B, T, D)``.
        positions: ``(T,)`` or ``(B, T)``, or ``(rows, B, T)`` for a `Rotary` with axes; None numbers the tokens.
        cache: cache of earlier tokens; a cache without positions continues its length.
        attention_mask: a bool array ``(B, S)``, ``False`` for padding, or a mask with one; others change nothing.
        position: of the config.

    Raises:
        TypeError: positions that are not integers.
        ValueError: positions of another shape, or none for a `Rotary` of images; another batch than that of the cache.
    """
    batch, tokens, _ = x.shape
    rows = position.num_rows if isinstance(position, Rotary) else 0
    every_row = isinstance(position, Rotary) and position.is_of_image
    if positions is not None:
        dtype = functional.dtype_name(positions, "positions")
        shape = functional.shape_of(positions)
        validation.check_positions(shape, dtype, batch, tokens, rows, every_row=every_row)
        return functional.signed(positions)
    validation.check_rows_given((rows, batch, tokens) if every_row else None)
    length = 0 if cache is None else cache.length
    numbers = jnp.arange(tokens, dtype=jnp.int32)
    continues = hasattr(cache, "positions") and not (running.is_known(length) and int(length) == 0)
    if continues:  # or a batch of 1 would be broadcast to the rows of the cache
        cache_validation.check_rows(batch, cache.positions.shape[0])
    first = cache.next_positions() if continues else length
    padding = _left_padding(attention_mask, batch)
    if padding is None:
        return first + numbers
    if continues:  # from positions that were given, too; only the padding that is left is in front
        return first + jnp.maximum(numbers - jnp.maximum(padding - length, 0), 0)
    return jnp.maximum(first + numbers - padding, 0)


def last_of_rows(positions: Int[Array, "... T"]) -> Int[Array, "... T"]:
    """Return one position per token, ``(T,)`` or ``(B, T)``: of several rows ``(rows, B, T)`` the largest.

    Text behind an image continues from the largest position of its last token (Qwen2-VL, arXiv 2409.12191).
    """
    return positions.max(0) if positions.ndim == 3 else positions


def _left_padding(attention_mask: Mask | Array | None, batch: int) -> Int[Array, "B 1"] | None:
    """Return how many keys a mask hides as padding in front of each sequence; None for a mask without padding."""
    if attention_mask is None:
        return None
    padding: Array | None = left_padding(functional.as_placed(attention_mask))
    if padding is None or not validation.is_one_of(padding.shape[0], (1, batch)):
        return None
    return padding.astype(jnp.int32)
