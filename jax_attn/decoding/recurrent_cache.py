"""The cache of recurrent layers: a state whose size does not depend on the number of earlier tokens.

The twin is `torch_attn.decoding.recurrent_cache`. Letters: B batch, T new tokens, H heads, D width of a key, Dv that of
a value, C channels and K taps of a convolution.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attn_bridge import cache_validation
from attn_bridge.recurrence import check_states, check_trim
from attn_bridge.validation import check_integer

from . import running


class RecurrentCache:
    """The states that the tokens so far left. It is a pytree; every method returns a new one.

    Attributes:
        state: ``(B, H, D, Dv)``, float32 or wider.
        conv_state: ``(B, K - 1, C)``, the last inputs of the convolution; None where there is none.
        length: number of tokens so far.
        capacity: most tokens it takes.
    """

    def __init__(
        self,
        state: Float[Array, "B H D Dv"],
        conv_state: Float[Array, "B K-1 C"] | None,
        length: Int[Array, ""],
        capacity: int,
    ):
        self.state = state
        self.conv_state = conv_state
        self.length = length
        self.capacity = capacity

    @classmethod
    def empty(
        cls,
        batch_size: int,
        capacity: int,
        state_shape: tuple[int, int, int],
        conv_shape: tuple[int, int] | None = None,
        *,
        dtype: DTypeLike | None = None,
    ) -> RecurrentCache:
        """Return a cache without tokens: every state is zeros.

        Args:
            batch_size: B.
            capacity: most tokens that it takes.
            state_shape: ``(H, D, Dv)``.
            conv_shape: ``(K - 1, C)``.
            dtype: of the module; the state itself is float32, float64 for float64.

        Raises:
            ValueError: a size below 1.
        """
        cache_validation.check_cache_sizes(running.least_size(batch_size), capacity)
        wide = jnp.promote_types(dtype or jnp.float32, jnp.float32)
        conv = None if conv_shape is None else jnp.zeros((batch_size, *conv_shape), dtype)
        return cls(jnp.zeros((batch_size, *state_shape), wide), conv, jnp.zeros((), jnp.int32), capacity)

    def admit(
        self,
        rows: int,
        tokens: int,
        mask_shape: tuple[int, int] | None = None,
        shapes: tuple[tuple[int, ...], tuple[int, ...] | None] | None = None,
    ) -> RecurrentCache:
        """Return a cache that new tokens can be computed with.

        Args:
            rows: sequences of the input.
            tokens: new tokens of each.
            mask_shape: ``(B, S)`` of a mask over all tokens so far, the new ones too (or up to the capacity); None for
                no such mask.
            shapes: those of the layer's states, ``(H, D, Dv)`` and ``(K - 1, C)`` or None; None for no check.

        Raises:
            ValueError: rows or states other than those of the cache, more tokens than the capacity, or a mask over
                other tokens.
                Inside ``jax.jit`` the last two are seen when the compiled function runs, which gives NaN besides.
        """
        cache_validation.check_rows(rows, self.state.shape[0])
        if shapes is not None:
            conv_shape = None if self.conv_state is None else tuple(self.conv_state.shape)
            check_states(tuple(self.state.shape), conv_shape, shapes)
        if running.is_known(self.length):
            self._check_room(rows, tokens, mask_shape, int(self.length))
            return self
        self._check_room(rows, tokens, mask_shape)
        length = self.length + tokens
        fits = length <= self.capacity
        if mask_shape is not None and mask_shape[1] != self.capacity:
            fits = fits & (length == mask_shape[1])
        check = functools.partial(self._check_room, rows, tokens, mask_shape)
        fits = running.raise_unless(fits, check, self.length)
        return self._become(jnp.where(fits, self.state, jnp.nan), self.conv_state, self.length)

    def _check_room(
        self, rows: int, tokens: int, mask_shape: tuple[int, int] | None, length: int | None = None
    ) -> None:
        """Check new tokens and their mask behind `length` tokens; None if that is not known."""
        cache_validation.check_room(length or 0, tokens, self.capacity)
        if mask_shape is not None:
            so_far = None if length is None else length + tokens
            cache_validation.check_mask_of_cache(mask_shape, "bool", rows, so_far, self.capacity)

    def advance(
        self, state: Float[Array, "B H D Dv"], conv_state: Float[Array, "B K-1 C"] | None, tokens: int
    ) -> RecurrentCache:
        """Take the states that `tokens` new tokens left, in the dtypes of the cache."""
        if conv_state is not None and self.conv_state is not None:
            conv_state = conv_state.astype(self.conv_state.dtype)
        return self._become(state.astype(self.state.dtype), conv_state, self.length + tokens)

    def trim(self, length: int) -> RecurrentCache:
        """Forget all tokens, or none: earlier states are not kept.

        Raises:
            TypeError: `length` is not an integer.
            ValueError: `length` is neither 0 nor the number of tokens so far. Inside ``jax.jit`` that is seen when the
                compiled function runs, and the states are NaN besides.
        """
        check_integer("length", length)
        keep, lost = jnp.asarray(length) > 0, 0.0
        if running.is_known(self.length, length):
            check_trim(length, int(self.length))
        elif not running.is_known(length) or length != 0:
            fits = (length == 0) | (length == self.length)
            fits = running.raise_unless(fits, check_trim, length, self.length)
            keep, lost = keep & fits, jnp.where(fits, 0.0, jnp.nan)
        state = jnp.where(keep, self.state, lost).astype(self.state.dtype)
        conv_state = self.conv_state
        if conv_state is not None:
            conv_state = jnp.where(keep, conv_state, lost).astype(conv_state.dtype)
        return self._become(state, conv_state, jnp.clip(jnp.asarray(length, jnp.int32), 0, self.length))

    def reorder(self, indices: Int[Array, "B"]) -> RecurrentCache:
        """Take the rows of the batch in another order, some several times or not at all, as beam search does.

        Raises:
            TypeError: indices that are not integers.
            ValueError: not one index per row, or one of no row. Inside ``jax.jit`` the latter is seen when the compiled
                function runs, and such a row is NaN besides.
        """
        at = running.known_rows(indices, self.state.shape[0])
        conv_state = None if self.conv_state is None else jnp.take(self.conv_state, at, 0, mode="fill")
        return self._become(jnp.take(self.state, at, 0, mode="fill"), conv_state, self.length)

    def _become(self, state: Array, conv_state: Array | None, length: Int[Array, ""]) -> RecurrentCache:
        return RecurrentCache(state, conv_state, length, self.capacity)


jax.tree_util.register_dataclass(RecurrentCache, ["state", "conv_state", "length"], ["capacity"])
