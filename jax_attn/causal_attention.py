"""Causal self-attention with dropout on the attention weights (book section 3.5).

Twins: `jax_attn.causal_attention`, `torch_attn.causal_attention`. Letters: b batch, t position, c channel.
"""

from __future__ import annotations

from typing import Never

import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jaxtyping import Float

from attn_bridge.masks import causal
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import CausalAttentionConfig

from . import functional
from .dropout import Dropout
from .initial_weights import linear
from .layer import Layer, LayerOptions, Unpack
from .random import Rngs
from .signatures import DType, typed_as
from .signatures.attention import AttentionCall, AttentionMask, Output


class CausalAttention(Layer):
    """Self-attention in which a token attends to itself and to what came before it.

    Args:
        d_in: width of the input.
        d_out: width of query, key, value and output.
        context_length: longest sequence it takes.
        dropout: rate at which attention weights are dropped in training; ``train()`` and ``eval()`` switch it.
            So does ``nnx.view``.
        qkv_bias: whether query, key and value have biases.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.

    Raises:
        ValueError: a size below 1, or `dropout` outside [0, 1).
    """

    @CausalAttentionConfig.spreads
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        *,
        rngs: Rngs,
        implementation: str | None = None,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = CausalAttentionConfig(d_in, d_out, context_length, dropout, qkv_bias)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.W_query = linear(d_in, d_out, bias=qkv_bias, **options)
        self.W_key = linear(d_in, d_out, bias=qkv_bias, **options)
        self.W_value = linear(d_in, d_out, bias=qkv_bias, **options)
        self.dropout = Dropout(self.config.dropout, rngs=rngs)

    @typed_as(AttentionCall)
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        return_weights: bool = False,
    ) -> Output:
        """Attend from every token to itself and to earlier tokens.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``, with T at most `context_length`.
            attention_mask: bool, ``True`` = may be attended: ``(B, S)``, or broadcastable to ``(B, 1, T, S)``; the
                causal mask applies in addition.
            return_weights: also return the attention weights ``(B, T, T)``, without ``B`` for 2-D `x`, as they are
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
        query, key, value = (
            rearrange(project(batch), "b t c -> b t 1 c") for project in (self.W_query, self.W_key, self.W_value)
        )
        for name, array in (("W_query", query), ("W_value", value)):
            check_width(name, array.shape[3], self.config.d_out)
        result = functional.dot_product_attention(
            query,
            key,
            value,
            mask=causal().restrict(attention_mask),
            return_weights=return_weights,
            **functional.attention_arguments(self),
        )
        context, weights = functional.as_pair(result)
        context = rearrange(context, "b t 1 c -> b t c")
        weights = None if weights is None else rearrange(weights, "b 1 t s -> b t s")
        return functional.as_given(x, context, weights)
