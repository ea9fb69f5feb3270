"""Lightning attention: linear attention to a state that each head fades at a fixed rate (arXiv 2405.17381).

As MiniMax-01 runs it: SiLU of query, key and value, a norm over all heads, then a sigmoid gate (arXiv 2501.08313).
Twins: `jax_attn.lightning_attention`, `torch_attn.lightning_attention`. Letters: b batch, t position, h head, c channel
of a head.
"""

from __future__ import annotations

from typing import Any, Never

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attn_bridge.masks import Mask
from attn_bridge.recurrence import check_form
from attn_bridge.specs import LightningAttentionConfig

from . import functional
from .decoding.recurrent_cache import RecurrentCache
from .initial_weights import linear
from .modes import takes_mode
from .random import Rngs
from .recurrent import decayed, recurrence
from .rms_norm import RMSNorm
from .signatures import DType, typed_as
from .signatures.attention import RecurrentCall


class LightningAttention(nnx.Module):
    """Attention to a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes and decay rates, see `LightningAttentionConfig`.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
    """

    @LightningAttentionConfig.takes
    def __init__(
        self,
        config: LightningAttentionConfig,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        implementation: str | None = None,
    ):
        self.config = config = LightningAttentionConfig.check(config)
        self.form = check_form(implementation)
        self.dtype = dtype
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.W_query = linear(config.d_in, config.width, bias=False, **options)
        self.W_key = linear(config.d_in, config.width, bias=False, **options)
        self.W_value = linear(config.d_in, config.width, bias=False, **options)
        self.W_gate = linear(config.d_in, config.width, bias=False, **options)
        self.norm = RMSNorm(config.width, config.eps, **options)
        self.out_proj = linear(config.width, config.d_out, bias=False, **options)

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
        """Read the tokens in order; each one fades the state, is added to it, and is answered from it.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool ``(B, S)``, ``False`` for padding, over all tokens so far, the new ones too. Padding is
                read as zeros: on the left it changes nothing; tokens behind padding read a state that has faded.
            positions: not used, since order alone counts; taken so that the layers of a model are called alike.
            cache: the state of earlier tokens, from `init_cache`; left as it is.
            form: ``"chunked"`` or ``"recurrent"``; None takes that of the constructor.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``, and the new cache if one was given.

        Raises:
            ValueError: shapes that do not fit, more tokens than the cache takes, or an unknown form.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        batch = functional.as_batch(x, self.W_query, d_in=self.config.d_in, cache=cache, misplaced=_misplaced)
        context, gate, *new_cache = self._attend(batch, attention_mask=attention_mask, cache=cache, form=form)
        # The norm spans all heads: where devices share them, it runs on the contexts of all devices.
        output = self.out_proj(self.norm(context) * gate)
        return functional.with_cache(functional.as_given(x, output, None), new_cache[0] if new_cache else None)

    def _attend(
        self,
        batch: Float[Array, "B T d"],
        *,
        attention_mask: Mask | Bool[Array, "B S"] | None,
        cache: RecurrentCache | None,
        form: str | None,
    ) -> tuple[Any, ...]:
        """Return the context and the gate of all heads, ``(B, T, H * C)``, and the new cache if one was given."""
        if cache is not None:
            cache = cache.admit(batch.shape[0], batch.shape[1], recurrence.mask_shape(attention_mask))
        batch = recurrence.without(batch, recurrence.visible_tokens(attention_mask, batch, cache))
        query, key, value = (
            rearrange(jax.nn.silu(project(batch)), "b t (h c) -> b t h c", h=self.config.num_heads)
            for project in (self.W_query, self.W_key, self.W_value)
        )
        # Fixed by head and layer, not learned: `decay_rates` of the config.
        rates = jnp.asarray(self.config.decay_rates, functional.wide_dtype(value))
        context, state = decayed.decayed_attention(
            query,
            key,
            value,
            -jnp.broadcast_to(rates, value.shape[:3]),
            state=None if cache is None else cache.state,
            form=form or self.form,
            **functional.attention_arguments(self),
        )
        context = rearrange(context.astype(value.dtype), "b t h c -> b t (h c)")
        gate = jax.nn.sigmoid(self.W_gate(batch))
        return (context, gate) if cache is None else (context, gate, cache.advance(state, None, batch.shape[1]))

    def init_cache(self, batch_size: int, capacity: int) -> RecurrentCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        config = self.config
        shape = (config.num_heads, config.head_dim, config.head_dim)
        return RecurrentCache.empty(batch_size, capacity, shape, **functional.cache_options(self.W_query))
