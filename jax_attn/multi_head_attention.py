"""Causal multi-head attention with split projections and an output projection (book section 3.6.2, arXiv 1706.03762).

Twins: `jax_attn.multi_head_attention`, `torch_attn.multi_head_attention`. Letters: b batch, t position, h head, c
channel of a head.
"""

from __future__ import annotations

from typing import Never

import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jaxtyping import Float

from attn_bridge.masks import causal
from attn_bridge.sharding.heads import check_groups, split_heads
from attn_bridge.specs import MultiHeadAttentionConfig

from . import functional
from .dropout import Dropout
from .initial_weights import linear
from .layer import Layer, LayerOptions, Unpack
from .random import Rngs
from .signatures import DType, typed_as
from .signatures.attention import AttentionCall, AttentionMask, Output


class MultiHeadAttention(Layer):
    """Causal multi-head attention: one query, key and value projection, split into heads, and an output projection.

    Args:
        d_in: width of the input.
        d_out: width of query, key, value and output, over all heads.
        context_length: longest sequence it takes.
        dropout: rate at which attention weights are dropped in training; ``train()`` and ``eval()`` switch it.
            So does ``nnx.view``.
        num_heads: number of heads; divides `d_out`.
        qkv_bias: whether query, key and value have biases; the output projection always has one.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.

    Raises:
        ValueError: a size below 1, `d_out` no multiple of `num_heads`, or `dropout` outside [0, 1).
    """

    @MultiHeadAttentionConfig.spreads
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float = 0.0,
        num_heads: int = 1,
        qkv_bias: bool = False,
        *,
        rngs: Rngs,
        implementation: str | None = None,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = MultiHeadAttentionConfig(d_in, d_out, context_length, dropout, num_heads, qkv_bias)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.W_query = linear(d_in, d_out, bias=qkv_bias, **options)
        self.W_key = linear(d_in, d_out, bias=qkv_bias, **options)
        self.W_value = linear(d_in, d_out, bias=qkv_bias, **options)
        self.out_proj = linear(d_out, d_out, **options)
        self.dropout = Dropout(self.config.dropout, rngs=rngs)

    @typed_as(AttentionCall)
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        return_weights: bool = False,
    ) -> Output:
        """Attend in every head from every token to itself and to earlier tokens.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``, with T at most `context_length`.
            attention_mask: bool, ``True`` = may be attended: ``(B, S)``, or broadcastable to ``(B, H, T, S)``; the
                causal mask applies in addition.
            return_weights: also return the attention weights ``(B, H, T, T)``, without ``B`` for 2-D `x`, as they are
                before dropout; the reference computes both then, which takes more time and memory.

        Returns:
            The context ``(T, d_out)`` or ``(B, T, d_out)``, and the weights if asked for.

        Raises:
            ValueError: shapes that do not fit, or more tokens than `context_length`.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        batch = functional.as_batch(
            x, self.W_query, d_in=self.config.d_in, context_length=self.config.context_length, misplaced=_misplaced
        )
        # By the width of a head, not by their number: a layer that was cut by heads has fewer of them.
        query, key, value = (
            split_heads(getattr(self, name)(batch), self.config.head_dim, name)
            for name in ("W_query", "W_key", "W_value")
        )
        check_groups(query.shape[2], key.shape[2])
        result = functional.dot_product_attention(
            query,
            key,
            value,
            mask=causal().restrict(attention_mask),
            return_weights=return_weights,
            **functional.attention_arguments(self),
        )
        context, weights = functional.as_pair(result)
        context = self.out_proj(rearrange(context, "b t h c -> b t (h c)"))
        return functional.as_given(x, context, weights)
