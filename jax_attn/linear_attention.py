"""Linear attention: products of positive features instead of the softmax, so that a state replaces the keys.

Katharopoulos et al., arXiv 2006.16236, with their features ``elu(x) + 1``. Twins: `jax_attn.linear_attention`,
`torch_attn.linear_attention`. Letters: b batch, t position, h head, c channel of a head.
"""

from __future__ import annotations

from typing import Never

import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jaxtyping import Float, Int

from attn_bridge.masks import causal
from attn_bridge.recurrence import check_form
from attn_bridge.sharding.heads import check_groups, split_heads
from attn_bridge.specs import LinearAttentionConfig

from . import functional
from .decoding.recurrent_cache import RecurrentCache
from .initial_weights import linear
from .layer import Layer, LayerOptions, Unpack
from .random import Rngs
from .recurrent import recurrence
from .recurrent.layer import empty_cache
from .signatures import DType, typed_as
from .signatures.attention import AttentionMask, CachedOutput, LinearAttentionCall


class LinearAttention(Layer):
    """Causal attention whose weights are ``features(query) features(key)``, divided by their sum over the keys.

    Args:
        config: sizes and biases, see `LinearAttentionConfig`.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.
    """

    @LinearAttentionConfig.takes
    def __init__(
        self,
        config: LinearAttentionConfig,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        implementation: str | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = config = LinearAttentionConfig.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        d_in, bias = config.d_in, config.qkv_bias
        self.W_query = linear(d_in, config.key_width, bias=bias, **options)
        self.W_key = linear(d_in, config.key_width, bias=bias, **options)
        self.W_value = linear(d_in, config.value_width, bias=bias, **options)
        self.out_proj = linear(config.value_width, config.d_out, bias=config.out_bias, **options)

    @typed_as(LinearAttentionCall)
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        positions: Int[Array, "... t"] | None = None,
        cache: RecurrentCache | None = None,
        return_weights: bool = False,
        form: str | None = None,
    ) -> CachedOutput[RecurrentCache]:
        """Attend from every token to itself and to earlier tokens.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool, ``True`` = may be attended: ``(B, S)`` over all tokens so far, the new ones too.
                Without a cache it may be anything that broadcasts to ``(B, H, T, S)``; one that differs between queries
                or heads needs the weights, and so time and memory that grow with T times S.
            positions: not used, since order alone counts; taken so that the layers of a model are called alike.
            cache: what earlier tokens left, from `init_cache`; left as it is.
            return_weights: also return the attention weights ``(B, H, T, T)``, without ``B`` for 2-D `x`; not with a
                cache, which holds no keys.
            form: ``"chunked"`` or ``"recurrent"``; None takes that of the constructor.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``; then the weights if asked for; then the cache if given.

        Raises:
            ValueError: shapes that do not fit, more tokens than the cache takes, or an unknown form.
            TypeError: an input that is not floating point, or a mask that is not bool.
            NotImplementedError: weights of tokens in a cache.
        """
        batch = functional.as_batch(
            x, self.W_query, d_in=self.config.d_in, cache=cache, cached="state", misplaced=_misplaced
        )
        if cache is not None:
            shapes = (self.config.state_shape, self.config.conv_shape)
            cache = cache.admit(batch.shape[0], batch.shape[1], recurrence.mask_shape(attention_mask), shapes)
        query, key, value = (
            split_heads(getattr(self, name)(batch), channels, name)
            for name, channels in (
                ("W_query", self.config.head_dim),
                ("W_key", self.config.head_dim),
                ("W_value", self.config.value_head_dim),
            )
        )
        check_groups(query.shape[2], key.shape[2], value_heads=value.shape[2])
        query, key = recurrence.relative_features(query), recurrence.positive_features(key)
        if cache is not None and return_weights:
            raise NotImplementedError("return_weights with a cache: it keeps a state, and no keys")
        weights = None
        if return_weights or (cache is None and not recurrence.hides_tokens_only(attention_mask)):
            weights = recurrence.linear_weights(query, key, causal().restrict(attention_mask))
            context = recurrence.average(weights, value)
        else:
            visible = recurrence.visible_tokens(attention_mask, batch, cache)
            # Hidden keys have features of 0: they add nothing to the sums, nor to the divisor. Values are zeroed as
            # well, as 0 times NaN is NaN.
            key, value = recurrence.without(key, visible), recurrence.without(value, visible)
            state = None if cache is None else cache.state
            arguments = {"state": state, "form": form or self.form, **functional.attention_arguments(self)}
            context, state = recurrence.linear_attention(query, key, value, **arguments)
            cache = cache if cache is None else cache.advance(state, None, batch.shape[1])
        output = self.out_proj(rearrange(context.astype(value.dtype), "b t h c -> b t (h c)"))
        returned = None if weights is None or not return_weights else weights.astype(value.dtype)
        return functional.with_cache(functional.as_given(x, output, returned), cache)

    def init_cache(self, batch_size: int, capacity: int) -> RecurrentCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        return empty_cache(self, batch_size, capacity)
