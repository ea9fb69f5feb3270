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
from torch.types import Device

from ..random import JaxRngs, RngStream
from . import masks
from .call import KernelCall


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """A dropout mask that is drawn already, ``True`` = kept: a device's part of a larger one, instead of an rng."""

    mask: Bool[Tensor, "..."]


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call; None, as it serves every one."""
    return None


def attend(call: KernelCall) -> Tensor | tuple[Tensor, Tensor]:
    """Return the context ``(B, T, H, Dv)``, and the weights ``(B, H, T, S)`` if the call asks for them."""
    weights = masked_softmax(_scores(call), call.allowed(), call.sinks)
    context = _average(drop(weights, call.dropout, call.rng), call.value.to(weights.dtype)).to(call.query.dtype)
    return (context, weights.to(call.query.dtype)) if call.return_weights else context


def attend_with_lse(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``, minus infinity without a key."""
    scores = _scores(call)
    allowed = call.allowed()
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    has_key = (scores != -torch.inf).any(-1, keepdim=True)
    scores = torch.where(has_key, scores, 0.0)
    # The shift cancels in the quotient, so no gradient flows through it.
    top = scores.detach().amax(-1, keepdim=True)
    if call.sinks is not None:
        sinks = rearrange(call.sinks.to(scores.dtype), "h -> h 1 1")
        top = torch.maximum(top, sinks.detach())
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if call.sinks is not None:
        # A sink is one more term of the divisor, and has no value to add.
        total = total + torch.exp(sinks - top)
    weights = torch.where(has_key, weights / total, 0.0)
    context = _average(drop(weights, call.dropout, call.rng), call.value.to(weights.dtype))
    sums = torch.where(has_key, top + torch.log(total), -torch.inf)[..., 0]
    return context.to(call.query.dtype), sums


def _scores(call: KernelCall) -> Float[Tensor, "B H T S"]:
    """Return the scores with their cap and bias, not masked yet."""
    query, key = call.query, call.key
    # Float32 at least: a bfloat16 score s would be off by up to 2**-9 of itself, and the weight exp(s) by s times that.
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    query_heads, key_heads = query.shape[2], key.shape[2]
    # Query head i reads key head i // g: the query heads that share a key head are neighbours (arXiv 2305.13245).
    q = rearrange(query.to(compute_dtype), "b t (h g) c -> b t h g c", h=key_heads, g=query_heads // key_heads)
    k = key.to(compute_dtype)
    scores = rearrange(einsum(q, k, "b t h g c, b s h c -> b h g t s"), "b h g t s -> b (h g) t s") * call.scale
    # Before the bias and the mask: a capped score is finite, so a hidden key would become visible.
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if call.bias is None else scores + call.bias.to(compute_dtype)


def _average(weights: Float[Tensor, "B H T S"], value: Float[Tensor, "B S K Dv"]) -> Float[Tensor, "B T H Dv"]:
    """Return the sums of the values by these weights."""
    heads = value.shape[2]
    dropped = rearrange(weights, "b (h g) t s -> b h g t s", h=heads)
    context = einsum(dropped, value, "b h g t s, b s h c -> b t h g c")
    return rearrange(context, "b t h g c -> b t (h g) c")


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
    """Zero each weight with probability `rate` and scale the rest by ``1 / (1 - rate)``; 0 and 1 draw nothing."""
    if rate == 0.0:
        return weights
    if rate == 1.0:  # the scale is infinite, and the gradient would be 0 times that
        return weights * 0.0
    rng = source_of(rate, rng)
    if rng is None:
        return nn.functional.dropout(weights, rate)
    keep = rng.mask if isinstance(rng, Drawn) else masks.draw_like(weights, rate, rng)
    return _scale_as_jax(weights, keep, rate) if isinstance(rng, RngStream) else _scale(weights, keep, rate)


def draw(
    shape: tuple[int, ...],
    rate: float,
    rng: torch.Generator | RngStream | JaxRngs | Drawn | None,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Bool[Tensor, "..."]:
    """Return a dropout mask, ``True`` = kept, with probability ``1 - rate``: that of weights of this dtype."""
    rng = source_of(rate, rng)
    if isinstance(rng, Drawn):
        return rng.mask
    if rng is None:
        return nn.functional.dropout(torch.ones(shape, dtype=dtype, device=device), rate) != 0.0
    return masks.drawing(rate, rng, dtype, device)(shape)


def source_of(
    rate: float, rng: torch.Generator | RngStream | JaxRngs | Drawn | None
) -> torch.Generator | RngStream | Drawn | None:
    """Return the source of a dropout mask; None is torch's global generator.

    Raises:
        TypeError: `rng` is something else.
    """
    if isinstance(rng, JaxRngs):
        rng = rng.dropout
    if rng is not None and not isinstance(rng, (torch.Generator, RngStream, Drawn)):
        raise TypeError(f"rng must be a torch.Generator, a stream, a JaxRngs or None, got {type(rng).__name__}")
    return rng


def _scale(weights: Float[Tensor, "..."], keep: Bool[Tensor, "..."], rate: float) -> Float[Tensor, "..."]:
    return torch.where(keep, weights / (1.0 - rate), 0.0)


def _scale_as_jax(weights: Float[Tensor, "..."], keep: Bool[Tensor, "..."], rate: float) -> Float[Tensor, "..."]:
    """Scale the kept weights as XLA does: it turns the division into a product; in bfloat16 it divides."""
    keep_prob = torch.tensor(1.0 - rate, dtype=weights.dtype, device=weights.device)
    scaled = weights / keep_prob if weights.dtype == torch.bfloat16 else weights * (1.0 / keep_prob)
    return torch.where(keep, scaled, 0.0)
