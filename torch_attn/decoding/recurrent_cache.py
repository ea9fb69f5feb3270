"""The cache of recurrent layers: a state whose size does not depend on the number of earlier tokens.

The twin is `jax_attn.decoding.recurrent_cache`. Letters: B batch, T new tokens, H heads, D width of a key, Dv that of a
value, C channels and K taps of a convolution.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.types import Device

from attn_bridge import cache_validation
from attn_bridge.recurrence import check_states, check_trim

from .. import functional, recomputation
from ..shards import beside
from .trees import register


class RecurrentCache:
    """The states that the tokens so far left. It is written in place, and every method returns it.

    Attributes:
        state: ``(B, H, D, Dv)``, float32 or wider.
        conv_state: ``(B, K - 1, C)``, the last inputs of the convolution; None where there is none.
        length: number of tokens so far.
        capacity: most tokens it takes.
    """

    def __init__(
        self,
        state: Float[Tensor, "B H D Dv"],
        conv_state: Float[Tensor, "B K-1 C"] | None,
        length: int,
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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> RecurrentCache:
        """Return a cache without tokens: every state is zeros.

        Args:
            batch_size: B.
            capacity: most tokens that it takes.
            state_shape: ``(H, D, Dv)``.
            conv_shape: ``(K - 1, C)``.
            device: where it lies.
            dtype: of the module; the state itself is float32, float64 for float64.

        Raises:
            ValueError: a size below 1.
        """
        cache_validation.check_cache_sizes(batch_size, capacity)
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        conv = None if conv_shape is None else torch.zeros(batch_size, *conv_shape, device=device, dtype=dtype)
        return cls(torch.zeros(batch_size, *state_shape, device=device, dtype=wide), conv, 0, capacity)

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
            RuntimeError: a checkpoint repeats the call in a backward pass.
        """
        cache_validation.check_rows(rows, self.state.shape[0])
        if shapes is not None:
            conv_shape = None if self.conv_state is None else tuple(self.conv_state.shape)
            check_states(tuple(self.state.shape), conv_shape, shapes)
        if not torch.compiler.is_compiling():
            recomputation.check_cache(self, self.length)
        cache_validation.check_room(self.length, tokens, self.capacity)
        if mask_shape is not None:
            cache_validation.check_mask_of_cache(mask_shape, "bool", rows, self.length + tokens, self.capacity)
        return self

    def advance(
        self, state: Float[Tensor, "B H D Dv"], conv_state: Float[Tensor, "B K-1 C"] | None, tokens: int
    ) -> RecurrentCache:
        """Take the states that `tokens` new tokens left, in the dtypes of the cache."""
        if conv_state is not None and self.conv_state is not None:
            conv_state = conv_state.to(self.conv_state.dtype)
        return self._become(state.to(self.state.dtype), conv_state, self.length + tokens)

    def trim(self, length: int) -> RecurrentCache:
        """Forget all tokens, or none: earlier states are not kept.

        Raises:
            TypeError: `length` is not an integer.
            ValueError: `length` is neither 0 nor the number of tokens so far.
        """
        check_trim(length, self.length)
        if length > 0:
            return self
        conv_state = None if self.conv_state is None else torch.zeros_like(self.conv_state)
        return self._become(torch.zeros_like(self.state), conv_state, 0)

    def reorder(self, indices: Int[Tensor, "B"]) -> RecurrentCache:
        """Take the rows of the batch in another order, some several times or not at all, as beam search does.

        Raises:
            TypeError: indices that are not integers.
            ValueError: not one index per row, or an index out of range.
        """
        dtype = functional.dtype_name(indices, "indices")
        rows_of_indices = () if torch.compiler.is_compiling() else indices.tolist()
        cache_validation.check_reorder(tuple(indices.shape), dtype, self.state.shape[0], rows_of_indices)
        indices = beside(indices, self.state)
        conv_state = None if self.conv_state is None else self.conv_state[indices]
        return self._become(self.state[indices], conv_state, self.length)

    def _become(self, state: Tensor, conv_state: Tensor | None, length: int) -> RecurrentCache:
        self.state, self.conv_state, self.length = state, conv_state, length
        return self


register(RecurrentCache, ("state", "conv_state", "length"), ("capacity",))
