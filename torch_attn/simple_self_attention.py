"""Simple self-attention: dot products, softmax, weighted sum, no trainable weights (book section 3.3).

Twins: `jax_attn.simple_self_attention`, `torch_attn.simple_self_attention`. Letters: b batch, t position, c channel.
"""

from __future__ import annotations

from typing import Never

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from attn_bridge.foreign_names import names_ours

from . import functional
from .signatures import typed_as
from .signatures.attention import AttentionMask, Output, SimpleAttentionCall


@typed_as(SimpleAttentionCall)
@names_ours
def simple_self_attention(
    x: Float[Tensor, "... t c"],
    *_misplaced: Never,
    attention_mask: AttentionMask | None = None,
    return_weights: bool = False,
) -> Output:
    """Return for every token the average of all tokens, weighted by the softmax of its dot products with them.

    Args:
        x: ``(T, D)`` or ``(B, T, D)``; nothing is scaled.
        attention_mask: bool, ``True`` = may be attended: ``(B, S)``, or broadcastable to ``(B, 1, T, S)``.
        return_weights: also return the attention weights ``(B, T, T)``, without ``B`` for 2-D `x`; the reference
            computes both then, which takes more time and memory.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: an input that is not floating point, or a mask that is not bool.
    """
    tokens = rearrange(functional.as_batch(x, misplaced=_misplaced), "b t c -> b t 1 c")
    result = functional.dot_product_attention(
        tokens, tokens, tokens, mask=attention_mask, scale=1.0, return_weights=return_weights
    )
    context, weights = functional.as_pair(result)
    context = rearrange(context, "b t 1 c -> b t c")
    weights = None if weights is None else rearrange(weights, "b 1 t s -> b t s")
    return functional.as_given(x, context, weights)
