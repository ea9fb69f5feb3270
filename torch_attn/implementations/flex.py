"""FlexAttention, compiled to one kernel of a GPU, for what `sdpa` has not: softcap (arXiv 2408.00118) and sinks.

Blocks that a mask hides are skipped, so that a window costs T times its size. Sinks (arXiv 2508.10925) enlarge each
softmax's sum, which scales the context by ``sigmoid(logsumexp - sink)``. Compiling takes seconds at the first call of
a kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from attn_bridge.masks import Mask

from . import sdpa, second_derivatives
from .call import KernelCall

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
"""Widths of heads that the kernel takes."""


def unavailable() -> str | None:
    """Return why it can't run on this machine; None if it can."""
    return None if torch.cuda.is_available() else "it needs a GPU"


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call; None if it can."""
    return unsupported_anywhere(call) if call.query.is_cuda else "query is on no GPU"


def unsupported_anywhere(call: KernelCall) -> str | None:
    """Return why it can't serve a call on any device; None if it can on some."""
    if call.return_weights:
        return "it does not return the weights"
    if call.bias is not None:
        return "it takes no bias"
    if call.dropout:
        return "it has no dropout"
    if call.mask is not None and next(call.mask.arrays(), None) is not None:
        return "it takes no mask arrays"
    if call.query.dtype == torch.float64:
        return "it does not compute in float64"
    for width in (call.query.shape[-1], call.value.shape[-1]):
        if not MIN_HEAD_DIM <= width <= MAX_HEAD_DIM:
            return f"head_dim ({width}) is not between {MIN_HEAD_DIM} and {MAX_HEAD_DIM}"
    return sdpa.in_higher_modes(call)


@second_derivatives.twice
def attend(call: KernelCall) -> Float[Tensor, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    return attend_by(_compiled(), call)


def attend_by(kernel: Callable[..., Tensor], call: KernelCall) -> Float[Tensor, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)`` from `flex_attention`, compiled or not."""
    query, key, value = (array.transpose(1, 2) for array in (call.query, call.key, call.value))
    softcap, sinks = call.softcap, call.sinks

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    blocks = None
    if call.mask is not None:
        _, _, queries, keys = call.scores_shape
        blocks = _block_mask(call.mask, queries, keys, call.query.device)
    result = kernel(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=blocks,
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else torch_flex.AuxRequest(lse=True),
    )
    if sinks is None:
        return result.transpose(1, 2)
    context, extra = result
    # exp(lse) / (exp(lse) + exp(sink)): the share of the sum that the keys have.
    share = torch.sigmoid(extra.lse - sinks.to(extra.lse.dtype)[:, None])
    return (context * share[..., None].to(context.dtype)).transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(torch_flex.flex_attention)


@functools.lru_cache(maxsize=32)
def _block_mask(mask: Mask, queries: int, keys: int, device: torch.device) -> torch_flex.BlockMask:
    """Return which blocks a mask hides; masks without arrays are equal by value, so that each is looked at once."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.allowed(query, key)

    return torch_flex.create_block_mask(visible, None, None, queries, keys, device=str(device))
