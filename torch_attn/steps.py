"""Chapter 3 step by step: scores, softmax, the two ways of masking, dropout scaling.

The modules do all of this in `functional.dot_product_attention`; these are the pieces on their own, for a learner to
call and compare. Letters: t query position, s key position, c channel; leading axes are left alone.
"""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor


def attention_scores(query: Float[Tensor, "... t c"], key: Float[Tensor, "... s c"]) -> Float[Tensor, "... t s"]:
    """Return the dot product of every query with every key, unscaled (book section 3.3.2)."""
    return einsum(query, key, "... t c, ... s c -> ... t s")


def sum_normalize(scores: Float[Tensor, "... s"]) -> Float[Tensor, "... s"]:
    """Divide each row by its sum: the chapter's first, fragile normalisation."""
    return scores / scores.sum(-1, keepdim=True)


def naive_softmax(scores: Float[Tensor, "... s"]) -> Float[Tensor, "... s"]:
    """Return ``exp(scores) / sum(exp(scores))`` as it stands; it overflows for scores near 89 in float32."""
    return sum_normalize(torch.exp(scores))


def softmax(scores: Float[Tensor, "... s"]) -> Float[Tensor, "... s"]:
    """Return the softmax of each row, with the row's largest score subtracted first, so that nothing overflows."""
    return sum_normalize(torch.exp(scores - scores.amax(-1, keepdim=True).detach()))


def causal_mask(num_tokens: int) -> Bool[Tensor, "t s"]:
    """Return the lower triangle: ``True`` where a query may attend, at its own position and before."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()


def mask_weights(
    weights: Float[Tensor, "... t s"], mask: Bool[Tensor, "... t s"], *, renormalize: bool = True
) -> Float[Tensor, "... t s"]:
    """Mask after the softmax: multiply by zero, then divide each row by its remaining sum (book section 3.5.1)."""
    kept = weights * mask
    return sum_normalize(kept) if renormalize else kept


def mask_scores(scores: Float[Tensor, "... t s"], mask: Bool[Tensor, "... t s"]) -> Float[Tensor, "... t s"]:
    """Mask before the softmax: hidden scores become minus infinity, so that their weights become zero."""
    return torch.where(mask, scores, -torch.inf)


def apply_dropout(
    weights: Float[Tensor, "... t s"], keep: Bool[Tensor, "... t s"], rate: float
) -> Float[Tensor, "... t s"]:
    """Zero the dropped weights and scale the rest by ``1 / (1 - rate)``, keeping the expected sum (section 3.5.2)."""
    return torch.where(keep, weights / (1.0 - rate), 0.0)


def context_vectors(weights: Float[Tensor, "... t s"], value: Float[Tensor, "... s c"]) -> Float[Tensor, "... t c"]:
    """Return the weighted sum of the values for every query."""
    return einsum(weights, value, "... t s, ... s c -> ... t c")
