"""Attention to another sequence, the context (arXiv 1706.03762, section 3.2.3), as in BART and Whisper.

Twins: `jax_attn.cross_attention`, `torch_attn.cross_attention`. Letters: b batch, t query position, s position in the
context, h head, c channel of a head.
"""

from __future__ import annotations

from typing import Never

import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jaxtyping import Float

from attn_bridge import validation
from attn_bridge.masks import full
from attn_bridge.sharding.heads import check_groups, split_heads
from attn_bridge.specs import CrossAttentionConfig

from . import functional
from .decoding.cache import KeyValueCache
from .dropout import Dropout
from .initial_weights import linear
from .layer import Layer, LayerOptions, Unpack
from .random import Rngs
from .signatures import DType, typed_as
from .signatures.attention import AttentionMask, CachedOutput, CrossAttentionCall


class CrossAttention(Layer):
    """Multi-head attention whose queries come from the input, and whose keys and values come from the context.

    Args:
        config: widths, heads and biases.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.
    """

    @CrossAttentionConfig.takes
    def __init__(
        self,
        config: CrossAttentionConfig,
        *,
        rngs: Rngs,
        implementation: str | None = None,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = config = CrossAttentionConfig.check(config)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.W_query = linear(config.d_in, query_width, config.qkv_bias, **options)
        self.W_key = linear(config.d_context, key_width, config.key_bias, **options)
        self.W_value = linear(config.d_context, key_width, config.qkv_bias, **options)
        self.out_proj = linear(query_width, config.d_out, config.out_bias, **options)
        self.dropout = Dropout(config.dropout, rngs=rngs)

    @typed_as(CrossAttentionCall)
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        context: Float[Array, "... s e"] | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
    ) -> CachedOutput[KeyValueCache]:
        """Attend from every token of the input to the whole context.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            context: ``(S, d_context)`` or ``(B, S, d_context)``; with a cache, it replaces the cached context, and None
                attends to that.
            attention_mask: bool, ``True`` = may be attended: ``(B, S)`` over the context, which a cache remembers, or
                broadcastable to ``(B, H, T, S)``.
            cache: of `init_cache`: holds the keys and values of the context.
            return_weights: also return the attention weights ``(B, H, T, S)``, without ``B`` for 2-D `x`, as they are
                before dropout.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``; then the weights if asked for; then the cache if given.

        Raises:
            ValueError: shapes that do not fit, a context that is longer than the cache, or none at all.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        config = self.config
        batch = functional.as_batch(x, self.W_query, d_in=config.d_in, cache=cache, misplaced=_misplaced)
        query = split_heads(self.W_query(batch), config.head_dim, "W_query")
        mask = full().restrict(attention_mask)
        if context is not None:
            other = functional.as_context(context, x, self.W_key, d_context=config.d_context)
            key = split_heads(self.W_key(other), config.head_dim, "W_key")
            value = split_heads(self.W_value(other), config.head_dim, "W_value")
        else:
            validation.check_has_context(cache is not None)
            assert cache is not None, "checked"
            cache, view = cache.look(attention_mask=attention_mask)
            key, value, mask = view.key, view.value, view.mask
        check_groups(query.shape[2], key.shape[2], config.num_heads, config.num_kv_heads)
        result = functional.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=config.scale,
            return_weights=return_weights,
            **functional.attention_arguments(self),
        )
        result, weights = functional.as_pair(result)
        if cache is not None and context is not None:
            # Last, so that a call that is refused leaves the old context.
            cache = cache.fill(key, value, attention_mask=attention_mask)
        output = self.out_proj(rearrange(result, "b t h c -> b t (h c)"))
        return functional.with_cache(functional.as_given(x, output, weights), cache)

    def init_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Return a cache without a context: for `batch_size` contexts of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        heads, width = self.config.num_kv_heads, self.config.head_dim
        return KeyValueCache.empty(batch_size, capacity, heads, width, **functional.cache_options(self.W_key))
