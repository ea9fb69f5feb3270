"""Gated short convolution: products of projections, convolved over a few tokens, and gated (LFM2, arXiv 2511.23404).

The paper's C, B and h are query, key and value here. Twins: `jax_attn.gated_convolution`,
`torch_attn.gated_convolution`.
"""

from __future__ import annotations

from typing import Never

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attn_bridge.masks import Mask
from attn_bridge.recurrence import check_form, choose_form
from attn_bridge.specs import GatedConvolutionConfig

from . import functional
from .decoding.recurrent_cache import RecurrentCache
from .initial_weights import linear
from .modes import takes_mode
from .random import Rngs
from .recurrent import recurrence
from .recurrent.short_convolution import ShortConvolution
from .signatures import DType, typed_as
from .signatures.attention import RecurrentCall


class GatedConvolution(nnx.Module):
    """A convolution of the products of keys and values, times the queries; causal, without positions.

    Args:
        config: sizes, see `GatedConvolutionConfig`.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        implementation: ``"chunked"`` or ``"recurrent"``, as in other recurrent layers; both compute the same.
    """

    @GatedConvolutionConfig.takes
    def __init__(
        self,
        config: GatedConvolutionConfig,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        implementation: str | None = None,
    ):
        self.config = config = GatedConvolutionConfig.check(config)
        self.form = check_form(implementation)
        self.dtype = dtype
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        width, use_bias = config.width, config.bias
        self.W_query = linear(config.d_in, width, use_bias, **options)
        self.W_key = linear(config.d_in, width, use_bias, **options)
        self.W_value = linear(config.d_in, width, use_bias, **options)
        self.conv1d = ShortConvolution(width, config.conv_size, use_bias, activate=False, **options)
        self.out_proj = linear(width, config.d_out, use_bias, **options)

    @typed_as(RecurrentCall)
    @takes_mode
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        attention_mask: Mask | Bool[Array, "B S"] | None = None,
        positions: Int[Array, "... t"] | None = None,
        cache: RecurrentCache | None = None,
        form: str | None = None,
    ) -> Array | tuple[Array, RecurrentCache]:
        """Read the tokens in order; each one is answered from itself and those just before it.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool ``(B, S)``, ``False`` for padding, over all tokens so far, the new ones too. The
                convolution reads padding as zeros: on the left it changes nothing.
            positions: not used, since order alone counts; taken so that the layers of a model are called alike.
            cache: what earlier tokens left, from `init_cache`; left as it is.
            form: ``"chunked"`` or ``"recurrent"``, which compute the same here.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``, and the new cache if one was given.

        Raises:
            ValueError: shapes that do not fit, more tokens than the cache takes, or an unknown form.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        batch = functional.as_batch(x, self.W_query, d_in=self.config.d_in, cache=cache, misplaced=_misplaced)
        if cache is not None:
            cache = cache.admit(batch.shape[0], batch.shape[1], recurrence.mask_shape(attention_mask))
        visible = recurrence.visible_tokens(attention_mask, batch, cache)
        batch = recurrence.without(batch, visible)
        choose_form(form or self.form, batch.shape[1])
        products = recurrence.without(self.W_key(batch) * self.W_value(batch), visible)  # biases are no zeros
        mixed, state = self.conv1d(products, None if cache is None else cache.state[:, 0])
        output = self.out_proj(self.W_query(batch) * mixed)
        if cache is not None:
            cache = cache.advance(state[:, None].astype(cache.state.dtype), None, batch.shape[1])
        return functional.with_cache(functional.as_given(x, output, None), cache)

    def init_cache(self, batch_size: int, capacity: int) -> RecurrentCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        config = self.config
        return RecurrentCache.empty(
            batch_size,
            capacity,
            (1, config.conv_size - 1, config.width),
            **functional.cache_options(self.W_query),
        )
