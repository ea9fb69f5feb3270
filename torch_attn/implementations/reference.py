"""Attention as plain einsum code: every call, the weights included, in memory that grows with T times S.

The twin is `jax_attn.implementations.reference`. Letters: b batch, t query position, s key position, h key/value
head, g query heads per key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..random import JaxRngs, RngStream
from .call import Call


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """A dropout mask that is drawn already, ``True`` = kept: a device's part of a larger one, in the place of rng."""

    mask: Bool[Tensor, "..."]


def unsupported(call: Call) -> str | None:
    """Return why it can't serve a call; None, as it serves every one."""
    return None


def attend(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Return the context ``(B, T, H, Dv)``, and the weights ``(B, H, T, S)`` if the call asks for them."""
    query, key, value = call.query, call.key, call.value
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    query_heads, key_heads = query.shape[2], key.shape[2]
    q = rearrange(query.to(compute_dtype), "b t (h g) c -> b t h g c", h=key_heads, g=query_heads // key_heads)
    k, v = key.to(compute_dtype), value.to(compute_dtype)
    scores = rearrange(einsum(q, k, "b t h g c, b s h c -> b h g t s"), "b h g t s -> b (h g) t s") * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.to(compute_dtype)
    weights = masked_softmax(scores, call.allowed(), call.sinks)
    dropped = rearrange(
        drop(weights, call.dropout, call.rng), "b (h g) t s -> b h g t s", h=key_heads, g=query_heads // key_heads
    )
    context = rearrange(einsum(dropped, v, "b h g t s, b s h c -> b t h g c"), "b t h g c -> b t (h g) c")
    context = context.to(query.dtype)
    return (context, weights.to(query.dtype)) if call.return_weights else context


def masked_softmax(
    scores: Float[Tensor, "B H T S"],
    allowed: Bool[Tensor, "..."] | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "B H T S"]:
    """Softmax over the allowed keys; a row without any is all zeros, with zero gradient.

    Args:
        scores: ``(B, H, T, S)``; minus infinity hides a key, too.
        allowed: bool, broadcastable to `scores`; None allows all.
        sinks: ``(H,)`` extra logits that take part in the sum only.
    """
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    has_key = (scores != -torch.inf).any(-1, keepdim=True)
    # A row of minus infinities would be NaN.
    scores = torch.where(has_key, scores, 0.0)
    if sinks is None:
        weights = softmax(scores)
    else:
        column = rearrange(sinks.to(scores.dtype), "h -> h 1 1").expand(*scores.shape[:-1], 1)
        weights = softmax(torch.cat([scores, column], -1))[..., :-1]
    return torch.where(has_key, weights, 0.0)


def softmax(scores: Float[Tensor, "... s"]) -> Float[Tensor, "... s"]:
    """Softmax over the last axis, whose gradient is ``weights * (g - sum(weights * g))``."""
    return torch.softmax(scores, -1)


def drop(
    weights: Float[Tensor, "..."], rate: float, rng: torch.Generator | RngStream | JaxRngs | Drawn | None = None
) -> Float[Tensor, "..."]:
    """Zero each weight with probability `rate` and scale the rest by ``1 / (1 - rate)``; rate 0 draws nothing."""
    if rate == 0.0:
        return weights
    if rng is None:
        return nn.functional.dropout(weights, rate)
    if isinstance(rng, Drawn):
        return torch.where(rng.mask, weights / (1.0 - rate), 0.0)
    if isinstance(rng, JaxRngs):
        rng = rng.dropout
    if isinstance(rng, RngStream):
        return _drop_as_jax(weights, rate, rng)
    if not isinstance(rng, torch.Generator):
        raise TypeError(f"rng must be a torch.Generator, a stream, a JaxRngs or None, got {type(rng).__name__}")
    keep = torch.empty_like(weights).bernoulli_(1.0 - rate, generator=rng)
    return torch.where(keep == 1.0, weights / (1.0 - rate), 0.0)


def _drop_as_jax(weights: Float[Tensor, "..."], rate: float, rng: RngStream) -> Float[Tensor, "..."]:
    """Drop with JAX's mask; XLA turns the division into a product with the reciprocal, in bfloat16 it divides."""
    keep = rng.bernoulli(1.0 - rate, weights.shape, device=weights.device)
    keep_prob = torch.tensor(1.0 - rate, dtype=weights.dtype, device=weights.device)
    scaled = weights / keep_prob if weights.dtype == torch.bfloat16 else weights * (1.0 / keep_prob)
    return torch.where(keep, scaled, 0.0)


def draw(
    shape: tuple[int, ...],
    rate: float,
    rng: torch.Generator | RngStream | JaxRngs | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Bool[Tensor, "..."]:
    """Return the mask, ``True`` = kept, with which `drop` would drop weights of this shape and dtype."""
    return drop(torch.ones(shape, dtype=dtype, device=device), rate, rng) != 0.0
