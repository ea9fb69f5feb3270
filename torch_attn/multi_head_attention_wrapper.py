"""Several causal heads side by side, concatenated (book section 3.6.1).

Twins: `jax_attn.multi_head_attention_wrapper`, `torch_attn.multi_head_attention_wrapper`. Letters: b batch, t position,
h head, c channel of a head.
"""

from __future__ import annotations

from typing import Never

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.masks import causal
from attn_bridge.specs import MultiHeadAttentionWrapperConfig

from . import functional
from .causal_attention import CausalAttention
from .dropout import Dropout
from .layer import Layer
from .random import JaxRngs
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
        num_heads: number of heads.
        qkv_bias: whether query, key and value have biases.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
            Its numbers are JAX's; None takes torch's global generator.
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.

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
        rngs: JaxRngs | None = None,
        implementation: str | None = None,
        device: Device = None,
        dtype: DType | None = None,
    ):
        super().__init__()
        self.config = MultiHeadAttentionWrapperConfig(d_in, d_out, context_length, dropout, num_heads, qkv_bias)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias, **options)
            for _ in range(self.config.num_heads)
        )
        self.dropout = Dropout(self.config.dropout, rngs=rngs)

    __call__: AttentionCall

    @typed_as(AttentionCall)
    def forward(
        self,
        x: Float[Tensor, "... t d"],
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
