"""Mamba: each channel keeps a state that fades by a step chosen from each token (Gu and Dao, arXiv 2312.00752).

As published: a short convolution before the states, a gate behind them. The paper's C, B and x are query, key and value
here. Twins: `jax_attn.mamba`, `torch_attn.mamba`. Letters: b batch, t position, c channel, k number of its state.
"""

from __future__ import annotations

from typing import Never

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attn_bridge.masks import Mask
from attn_bridge.recurrence import check_form
from attn_bridge.specs import MambaConfig

from . import functional
from .decoding.recurrent_cache import RecurrentCache
from .initial_weights import linear, uniform
from .modes import takes_mode
from .random import Rngs
from .recurrent import decayed, recurrence, selective
from .recurrent.gated_norm import GatedNorm
from .recurrent.short_convolution import ShortConvolution
from .rms_norm import RMSNorm
from .signatures import DType, typed_as
from .signatures.attention import RecurrentCall


class Mamba(nnx.Module):
    """Selective state space layer: a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes, see `MambaConfig`.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
    """

    @MambaConfig.takes
    def __init__(
        self,
        config: MambaConfig,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        implementation: str | None = None,
    ):
        self.config = config = MambaConfig.check(config)
        self.form = check_form(implementation)
        self.dtype = dtype
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        width, state, rank = config.width, config.state_size, config.step_rank
        self.W_gate = linear(config.d_in, width, config.bias, **options)
        self.W_value = linear(config.d_in, width, config.bias, **options)
        self.conv1d = ShortConvolution(width, config.conv_size, config.conv_bias, **options)
        self.W_step_down = linear(width, rank, False, **options)
        self.W_key = linear(width, state, False, **options)
        self.W_query = linear(width, state, False, **options)
        if config.latent_norms == "scaled":
            self.step_norm = RMSNorm(rank, config.eps, **options)
            self.k_norm = RMSNorm(state, config.eps, **options)
            self.q_norm = RMSNorm(state, config.eps, **options)
        self.W_step_up = linear(rank, width, False, **options)
        self.dt_bias = nnx.Param(decayed.initial_step_bias(uniform((width,), **options)))
        self.A_log = nnx.Param(selective.initial_rates(width, state, param_dtype=param_dtype))
        self.D = nnx.Param(jnp.ones(width, param_dtype))
        self.norm = GatedNorm(width, order="none", **options)
        self.out_proj = linear(width, config.d_out, config.bias, **options)

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
        """Read the tokens in order; each one changes the states and is answered from them.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool ``(B, S)``, ``False`` for padding, over all tokens so far, the new ones too. Padding is
                read as zeros, before the convolution and behind it: on the left it changes nothing; tokens behind other
                padding meet a state that has decayed and a convolution that has seen zeros.
            positions: not used, since order alone counts; taken so that the layers of a model are called alike.
            cache: what earlier tokens left, from `init_cache`; left as it is.
            form: ``"chunked"`` or ``"recurrent"``; None takes that of the constructor.

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
        value = recurrence.without(self.W_value(batch), visible)  # a bias of the projection is no zero
        value, conv_state = self.conv1d(value, None if cache is None else cache.conv_state)
        value = recurrence.without(value, visible)
        low, key, query = (
            self._normalise(layer(value), name)
            for layer, name in ((self.W_step_down, "step_norm"), (self.W_key, "k_norm"), (self.W_query, "q_norm"))
        )
        steps = decayed.step_sizes(self.W_step_up(low), self.dt_bias, 0.0, None)
        wide = value.astype(steps.dtype)
        context, state = selective.selective_scan(
            query,
            key,
            wide,
            steps,
            -jnp.exp(self.A_log.astype(steps.dtype)),
            state=None if cache is None else cache.state,
            form=form or self.form,
            **functional.attention_arguments(self),
        )
        context = context + self.D.astype(steps.dtype) * wide
        output = self.out_proj(self.norm(context, self.W_gate(batch)).astype(value.dtype))
        cache = cache if cache is None else cache.advance(state, conv_state, batch.shape[1])
        return functional.with_cache(functional.as_given(x, output, None), cache)

    def _normalise(self, latent: Float[Array, "b t k"], name: str) -> Float[Array, "b t k"]:
        """Return the latent step, the keys or the queries as the config has them normalised."""
        if self.config.latent_norms == "none":
            return latent
        if self.config.latent_norms == "plain":
            return selective.mean_square_one(latent, self.config.eps)
        return getattr(self, name)(latent)

    def init_cache(self, batch_size: int, capacity: int) -> RecurrentCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        config = self.config
        return RecurrentCache.empty(
            batch_size,
            capacity,
            (1, config.state_size, config.width),
            (config.conv_size - 1, config.width),
            **functional.cache_options(self.W_query),
        )
