"""The call and the cache of layers that read tokens in order and keep a state of one size instead of keys.

Twins: `jax_attn.recurrent.layer`, `torch_attn.recurrent.layer`. Letters: B batch, T tokens of the call, S tokens with
those in the cache, H heads, D and Dv channels of key and value, K taps and C channels of the convolution.
"""

from __future__ import annotations

from typing import Never, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from .. import functional
from ..decoding.recurrent_cache import RecurrentCache
from ..layer import Layer
from ..signatures import typed_as
from ..signatures.attention import AttentionMask, RecurrentCall
from . import recurrence

Tokens: TypeAlias = Float[Array, "B T d"]
"""The tokens of a call."""

Visible: TypeAlias = Bool[Array, "B T"] | None
"""The tokens that are not padding; None if all are."""

States: TypeAlias = tuple[Float[Array, "B H D Dv"] | None, Float[Array, "B K-1 C"] | None]
"""The state, and the last inputs of the convolution; None before the first token, and without a convolution."""

LayerRead: TypeAlias = tuple[Float[Array, "B T e"], tuple[Float[Array, "B H D Dv"], Float[Array, "B K-1 C"] | None]]
"""The output, and the states that the tokens leave."""


class RecurrentLayer(Layer):
    """Base of recurrent layers; a subclass sets `config` and `form`, has a layer `W_query`, and defines `_read`.

    Attributes:
        config: has `d_in`, and the shapes of a cache: `state_shape`, `conv_shape`.
        form: ``"chunked"`` or ``"recurrent"``, the form of calls that name none; None takes chunks unless there is a
            single token.
    """

    form: str | None

    @typed_as(RecurrentCall)
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        positions: Int[Array, "... t"] | None = None,
        cache: RecurrentCache | None = None,
        form: str | None = None,
    ) -> Array | tuple[Array, RecurrentCache]:
        """Read the tokens in order; each one changes the state and is answered from it.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool ``(B, S)``, ``False`` for padding, over all tokens so far, the new ones too. As in
                Transformers, padding is read as zeros, by the convolution too: on the left it changes nothing; tokens
                behind other padding meet a state that has decayed and a convolution that has seen zeros.
            positions: not used, since order alone counts; taken so that the layers of a model are called alike.
            cache: the states of earlier tokens, from `init_cache`; left as it is.
            form: ``"chunked"`` or ``"recurrent"``; None takes that of the constructor.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``, and the new cache if one was given.

        Raises:
            ValueError: shapes that do not fit, more tokens than the cache takes, or an unknown form.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        options = {"d_in": self.config.d_in, "cache": cache, "cached": "state", "misplaced": _misplaced}
        batch = functional.as_batch(x, self.W_query, **options)
        output, cache = self._run(batch, attention_mask, cache, form or self.form)
        return functional.with_cache(functional.as_given(x, output, None), cache)

    def _run(
        self,
        batch: Tokens,
        attention_mask: AttentionMask | None,
        cache: RecurrentCache | None,
        form: str | None,
    ) -> tuple[Array, RecurrentCache | None]:
        """Return the output ``(B, T, d_out)``, and the cache after these tokens."""
        if cache is not None:
            shapes = (self.config.state_shape, self.config.conv_shape)
            cache = cache.admit(batch.shape[0], batch.shape[1], recurrence.mask_shape(attention_mask), shapes)
        visible = recurrence.visible_tokens(attention_mask, batch, cache)
        states = (None, None) if cache is None else (cache.state, cache.conv_state)
        output, (state, conv_state) = self._read(recurrence.without(batch, visible), visible, states, form)
        return output, cache if cache is None else cache.advance(state, conv_state, batch.shape[1])

    def _read(self, batch: Tokens, visible: Visible, states: States, form: str | None) -> LayerRead:
        """Return the output of the tokens, in which padding is zeros, and the states that they leave."""
        raise NotImplementedError

    def init_cache(self, batch_size: int, capacity: int) -> RecurrentCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        return empty_cache(self, batch_size, capacity)


def empty_cache(module: nnx.Module, batch_size: int, capacity: int) -> RecurrentCache:
    """Return a cache without tokens, in the dtype of `W_query`, or of the widest numbers if that was replaced."""
    options = functional.cache_options(module.W_query)
    if options["dtype"] is None:  # that of its results is not known yet, and states keep theirs
        is_wide = any(array.dtype == jnp.float64 for array in jax.tree.leaves(nnx.state(module)))
        options["dtype"] = jnp.float64 if is_wide else jnp.float32
    shapes = (module.config.state_shape, module.config.conv_shape)
    return RecurrentCache.empty(batch_size, capacity, *shapes, **options)
