"""Some rows of queries at a time, on processors: what torch's fused kernel lacks, in memory that the caches hold.

The plain formula of `reference`, in ordinary operations, so that all derivatives are there. It takes a fraction of the
time, as keys beyond those that some of the rows see are left out, and as blocks are small enough for the allocator to
use their memory again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_bridge.masks import Mask

from .call import KernelCall
from .reference import masked_softmax, softmax

MIN_ROWS, MAX_ROWS = 16, 128
"""Queries per block: of 64, 128 and 256, 128 are fastest (4 sequences of 1024 tokens, 12 heads of 64, 2 cores). Keys
are skipped in blocks of the same size."""

MAX_SCORES = 2**22
"""Scores of a block: 16 MiB. Beyond 32 glibc gives memory back at once and has it cleared for the next block."""


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call; None if it can."""
    if call.return_weights:
        return "it does not return the weights"
    if call.dropout:
        return "it has no dropout"
    if 0 in call.query.shape or 0 in call.value.shape:
        return f"there is nothing in the query {tuple(call.query.shape)} or the value {tuple(call.value.shape)}"
    if not call.query.is_cpu:
        return "it is for processors"
    if torch.compiler.is_compiling() or not all(isinstance(size, int) for size in call.scores_shape):
        return "a compiler would write out each of its blocks"
    return None


def attend(call: KernelCall) -> Float[Tensor, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    batch, heads, queries, keys = call.scores_shape
    key_heads = call.key.shape[2]
    query, key, value = (array.transpose(1, 2).to(dtype).contiguous() for array in (call.query, call.key, call.value))
    may_hide = _may_hide_rows(call)
    allowed = call.allowed() if call.mask is not None and next(call.mask.arrays(), None) is not None else None
    positions, contexts = torch.arange(max(queries, keys), device="cpu"), []
    for start, stop, first, last in _blocks(call.mask, _rows(call), queries, keys):
        # The queries of heads that share keys are rows of one product, so that no key is repeated.
        rows = query[:, :, start:stop].unflatten(1, (key_heads, -1)).flatten(2, 3)
        scores = (rows @ key[:, :, first:last].transpose(2, 3)) * call.scale
        scores = scores.view(batch, heads, stop - start, last - first)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.bias is not None:
            scores = scores + _part(call.bias, start, stop, first, last).to(dtype)
        seen = None
        if allowed is not None:
            seen = _part(allowed, start, stop, first, last)
        elif call.mask is not None:
            seen = call.mask.allowed(positions[start:stop, None], positions[None, first:last])
        weights = masked_softmax(scores, seen, call.sinks) if may_hide else _softmax(scores, seen, call.sinks)
        context = weights.reshape(batch, key_heads, -1, last - first) @ value[:, :, first:last]
        contexts.append(context.view(batch, heads, stop - start, value.shape[-1]))
    return torch.cat(contexts, 2).transpose(1, 2).to(call.query.dtype)


def _softmax(
    scores: Float[Tensor, "B H T S"], allowed: Bool[Tensor, "..."] | None, sinks: Float[Tensor, "H"] | None
) -> Float[Tensor, "B H T S"]:
    """Like `masked_softmax`, for rows that all have a key, which saves the search for empty ones."""
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    if sinks is None:
        return softmax(scores)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return softmax(torch.cat([scores, column], -1))[..., :-1]


def _may_hide_rows(call: KernelCall) -> bool:
    """Return whether there may be a query that sees no key, as far as that is known without a look at arrays."""
    if call.bias is not None:
        return True
    if call.mask is None:
        return False
    _, _, queries, keys = call.scores_shape
    seen = call.mask.interval(np.arange(queries))
    return seen is None or bool((np.maximum(seen[0], 0) >= np.minimum(seen[1], keys)).any())


def _rows(call: KernelCall) -> int:
    batch, heads, _, keys = call.scores_shape
    return min(MAX_ROWS, max(MIN_ROWS, MAX_SCORES // (batch * heads * keys)))


def _blocks(mask: Mask | None, rows: int, queries: int, keys: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield which rows, and the keys that some of them may see, at least one."""
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        first, last = 0, keys
        if mask is not None:
            seen = [
                at
                for at in range(0, keys, MAX_ROWS)
                if mask.visibility(range(start, stop), range(at, min(at + MAX_ROWS, keys))) is not False
            ]
            first, last = (seen[0], min(seen[-1] + MAX_ROWS, keys)) if seen else (0, 1)
        yield start, stop, first, last


def _part(array: Bool[Tensor, "..."] | Float[Tensor, "..."], start: int, stop: int, first: int, last: int) -> Tensor:
    """Return the part of an array broadcastable to the scores that belongs to some rows and columns."""
    if array.ndim > 1 and array.shape[-2] > 1:
        array = array[..., start:stop, :]
    return array[..., first:last] if array.ndim and array.shape[-1] > 1 else array
