"""A window at a cost of T times its size: blocks of queries, each against the keys that it can see, in one fused call.

Works for a `sliding_window`, offset or not, joined with padding. Letters: b batch, m block, i query of a block,
s key of a block, h head, c channel of a head.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from attn_bridge.masks import ArrayMask, as_band

from . import sdpa, second_derivatives
from .call import KernelCall
from .sizes import is_open

MIN_BLOCK, MAX_BLOCK = 32, 128
"""Queries per block. A block sees ``block + size - 1`` keys, so that a large one wastes work and a small one copies.
Of 64, 128, 256 and 512, forward and backward are fastest at 128 (windows of 256 and 1024 on a core with AVX2)."""


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call; None if it can."""
    window = _window_of(call)
    if window is None:
        return "the mask is no window"
    if call.bias is not None:
        return "it takes no bias"
    if call.dropout:
        return "it has no dropout"
    offset, size, arrays = window
    if any(_per_query_or_head(one) for one in arrays):
        return "it takes no mask array of queries or heads"
    _, _, queries, keys = call.scores_shape
    if is_open(queries) or is_open(keys):
        return "blocks are cut for known sizes, and those of an exported program are open"
    # A block sees `block + size - 1` keys: where there are no more, blocks would save nothing.
    if queries == 0 or keys <= size + _block(queries, size):
        return "the window is not smaller than the keys"
    if not -queries < offset < keys + size - 1:
        return "no query sees a key"
    return sdpa.unsupported(call)


@second_derivatives.twice
def attend(call: KernelCall) -> Float[Tensor, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    window = _window_of(call)
    assert window is not None, "`unsupported` saw to it"
    offset, size, arrays = window
    batch, heads, queries, keys = call.scores_shape
    block = _block(queries, size)
    blocks = -(-queries // block)
    # Position of the first key of query 0, negative where its window begins before the keys.
    first = offset - size + 1
    span = block + size - 1

    def cut(array: Tensor, value: float = 0) -> Tensor:
        """Return ``(B, S, ...)`` as ``(B, m, ..., s)``: the keys of every block, those beyond the ends made up."""
        # A negative end, where keys lie in front of the first window or behind the last, cuts them off.
        ends = (-first, first + (blocks - 1) * block + span - keys)
        return pad(array, (0, 0) * (array.ndim - 2) + ends, value=value).unfold(1, span, block)

    inside = cut(torch.ones(1, keys, dtype=torch.bool, device=call.query.device), False)[0]
    allowed = rearrange(inside, "m s -> m 1 1 s") & _diagonal(block, span, size, inside.device)
    folded = "m (b {h})"
    if arrays:
        # Sequences that hide keys of their own have masks of their own.
        folded = "(b m) {h}"
        allowed = rearrange(allowed, "m 1 i s -> 1 m 1 i s")
        for mask in arrays:
            rows = mask.allowed(None, None)[:, 0, 0].expand(-1, keys)
            allowed = allowed & rearrange(cut(rows, False), "b m s -> b m 1 1 s")
        allowed = rearrange(allowed.expand(batch, *allowed.shape[1:]), "b m 1 i s -> (b m) 1 i s")
    query = pad(call.query, (0, 0, 0, 0, 0, blocks * block - queries))
    query = rearrange(query, f"b (m i) h c -> {folded.format(h='h')} i c", m=blocks)
    key, value = (rearrange(cut(one), f"b m h c s -> {folded.format(h='h')} s c") for one in (call.key, call.value))
    context = sdpa.fused(query, key, value, allowed, scale=call.scale)
    context = rearrange(context, f"{folded.format(h='h')} i c -> b (m i) h c", b=batch, h=heads)
    return context[:, :queries]


def _window_of(call: KernelCall) -> tuple[int, int, tuple[ArrayMask, ...]] | None:
    """Return the offset and the size of the window of a call, and the arrays joined with it; None without a window."""
    band = None if call.mask is None else as_band(call.mask)
    if band is None or band[0].size is None:
        return None
    return band[0].offset, band[0].size, band[1]


def _block(queries: int, size: int) -> int:
    return min(queries, max(MIN_BLOCK, min(MAX_BLOCK, size)))


def _diagonal(block: int, span: int, size: int, device: torch.device) -> Bool[Tensor, "i s"]:
    """Return which of its block's keys a query sees: those up to its own, `size` of them."""
    distance = torch.arange(block, device=device)[:, None] + size - 1 - torch.arange(span, device=device)
    return (distance >= 0) & (distance < size)


def _per_query_or_head(mask: ArrayMask) -> bool:
    array = mask.allowed(None, None)
    return array.ndim != 4 or array.shape[1] > 1 or array.shape[2] > 1
