"""What decoding keeps of the tokens before where attention keeps a state: of one size, however many they were.

The twin is `torch_attn.recurrent_cache`. Letters: B batch, T new tokens, H heads, D width of a key, Dv that of a
value, C channels and K taps of a convolution.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from attn_bridge.recurrence import check_cache_sizes, check_reorder, check_room, check_rows, check_trim


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
        dtype: Any = None,
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
        check_cache_sizes(batch_size, capacity)
        wide = jnp.promote_types(dtype or jnp.float32, jnp.float32)
        conv = None if conv_shape is None else jnp.zeros((batch_size, *conv_shape), dtype)
        return cls(jnp.zeros((batch_size, *state_shape), wide), conv, jnp.zeros((), jnp.int32), capacity)

    def admit(self, rows: int, tokens: int) -> RecurrentCache:
        """Return a cache that new tokens can be computed with.

        Args:
            rows: sequences of the input.
            tokens: new tokens of each.

        Raises:
            ValueError: other rows than those of the cache, or more tokens than the capacity. Inside ``jax.jit`` that is
                seen when the compiled function runs, which then gives NaN besides.
        """
        check_rows(rows, self.state.shape[0])
        if not isinstance(self.length, jax.core.Tracer):
            check_room(int(self.length), tokens, self.capacity)
            return self
        fits = self.length + tokens <= self.capacity
        refuse = functools.partial(jax.debug.callback, check_room, self.length, tokens, self.capacity)
        jax.lax.cond(fits, lambda: None, refuse)
        return self._become(jnp.where(fits, self.state, jnp.nan), self.conv_state, self.length)

    def advance(
        self, state: Float[Array, "B H D Dv"], conv_state: Float[Array, "B K-1 C"] | None, tokens: int
    ) -> RecurrentCache:
        """Take the states that `tokens` new tokens left."""
        return self._become(state, conv_state, self.length + tokens)

    def trim(self, length: int) -> RecurrentCache:
        """Forget all tokens, or none: a state does not tell what it was before.

        Raises:
            ValueError: `length` is neither 0 nor the number of tokens so far.
        """
        if not isinstance(self.length, jax.core.Tracer):
            check_trim(length, int(self.length))
        keep = jnp.asarray(length) > 0
        conv_state = None if self.conv_state is None else jnp.where(keep, self.conv_state, 0.0)
        return self._become(jnp.where(keep, self.state, 0.0), conv_state, jnp.asarray(length, jnp.int32))

    def reorder(self, indices: Int[Array, "B"]) -> RecurrentCache:
        """Take the rows of the batch in another order, some several times or not at all, as beam search does.

        Raises:
            ValueError: not one index per row.
        """
        check_reorder(indices.shape, self.state.shape[0])
        conv_state = None if self.conv_state is None else self.conv_state[indices]
        return self._become(self.state[indices], conv_state, self.length)

    def _become(self, state: Array, conv_state: Array | None, length: Int[Array, ""]) -> RecurrentCache:
        return RecurrentCache(state, conv_state, length, self.capacity)


jax.tree_util.register_dataclass(RecurrentCache, ["state", "conv_state", "length"], ["capacity"])
