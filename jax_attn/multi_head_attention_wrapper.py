"""Several causal heads side by side, concatenated (book section 3.6.1).

Twins: `jax_attn.multi_head_attention_wrapper`, `torch_attn.multi_head_attention_wrapper`. Letters: b batch, t position,
h head, c channel of a head.
"""

from __future__ import annotations

from typing import Never

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import Array
from jaxtyping import Float

from attn_bridge.masks import causal
from attn_bridge.specs import MultiHeadAttentionWrapperConfig

from . import functional
from .causal_attention import CausalAttention
from .dropout import Dropout
from .layer import Layer, LayerOptions, Unpack
from .random import Rngs
from .signatures import DType, typed_as
from .signatures.attention import AttentionCall, AttentionMask, Output


class MultiHeadAttentionWrapper(Layer):
    """Multi-head attention as a list of `CausalAttention`, whose outputs are concatenated; no output projection.

    The heads hold the weights; their attention is computed in one call, all heads at once.

    Args:
        d_in: width of the input.
        d_out: width of query, key, value and output of each head; the output has ``d_out * num_heads``.
        context_length: longest sequence it takes.
        dropout: rate at which attention weights are dropped in training; ``train()`` and ``eval()`` switch it.
            So does ``nnx.view``.
        num_heads: number of heads.
        qkv_bias: whether query, key and value have biases.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.

    Raises:
        ValueError: a size below 1, or `dropout` outside [0, 1).
    """

    @MultiHeadAttentionWrapperConfig.spreads
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
        self.config = MultiHeadAttentionWrapperConfig(d_in, d_out, context_length, dropout, num_heads, qkv_bias)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.heads = nnx.List(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, **options)
            for _ in range(self.config.num_heads)
        )
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
            The context ``(T, d_out * num_heads)`` or ``(B, T, d_out * num_heads)``, and the weights if asked for.

        Raises:
            ValueError: shapes that do not fit, or more tokens than `context_length`.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        batch = functional.as_batch(
            x,
            self.heads[0].W_query,
            d_in=self.config.d_in,
            context_length=self.config.context_length,
            misplaced=_misplaced,
        )
        query, key, value = functional.project_heads(batch, self.heads)
        result = functional.dot_product_attention(
            query,
            key,
            value,
            mask=causal().restrict(attention_mask),
            return_weights=return_weights,
            **functional.attention_arguments(self),
        )
        context, weights = functional.as_pair(result)
        return functional.as_given(x, rearrange(context, "b t h c -> b t (h c)"), weights)
