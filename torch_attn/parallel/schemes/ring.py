"""Context parallel attention in which keys and values travel round a ring: a device holds those of one other at a time.

Results for different keys are combined by the logarithms of their sums (arXiv 2310.01889), in float32, in float64 for
float64 input. The gradient is written by hand, so that scores are recomputed and keys travel round once more, with
their gradients. Letters: b batch, t query position, s key position, h query head, k key/value head, g query heads per
key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from attn_bridge.masks import Mask
from attn_bridge.sharding import turns

from ... import implementations
from ...implementations import KernelCall
from ...implementations.reference import Drawn
from ..exchange import to_next
from ..masks import block_of
from .balance import Places
from .part import Part

MAX_SCORES = 2**22
"""Scores that are computed at once."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """The settings of a ring, without its arrays.

    Attributes:
        at: the queries and keys that each device serves.
        keys: number of keys of all devices.
        mask: for the device's sequences and heads, in positions of the whole sequence.
        keep: dropout mask ``(b, h, t, s)``, None without dropout; all keys.
        scale: factor of the scores.
        softcap: as in `functional.dot_product_attention`.
        dropout: rate.
        implementation: the requested one, None for the fastest.
    """

    at: Places
    keys: int
    mask: Mask | None
    keep: Bool[Tensor, "b h t s"] | None
    scale: float
    softcap: float | None
    dropout: float
    implementation: str | None

    def blocks(self, hop: int, queries: int, rows_at_once: int) -> Iterator[Block]:
        """Yield the blocks of a device's turn: some of its queries, and keys that some of them see."""
        devices, rank = self.at.devices, self.at.rank
        of_keys = dataclasses.replace(self.at, tokens=self.keys)
        starts, key_starts = self.at.starts(), of_keys.starts(turns(devices)[hop].owner(rank, devices))
        count, key_count = queries // len(starts), self.keys // devices // len(key_starts)
        for number, start in enumerate(starts):
            for other, key_start in enumerate(key_starts):
                keys = range(key_start, key_start + key_count)
                for first in range(0, count, rows_at_once):
                    last = min(first + rows_at_once, count)
                    seen = range(start + first, start + last)
                    if self.mask is None or self.mask.visibility(seen, keys) is not False:
                        rows = slice(number * count + first, number * count + last)
                        yield Block(seen, keys, rows, slice(other * key_count, (other + 1) * key_count))


@dataclasses.dataclass(frozen=True)
class Block:
    """Queries and keys that meet.

    Attributes:
        queries: their positions.
        keys: their positions.
        rows: which of the device's queries they are.
        columns: which of the keys that are held they are.
    """

    queries: range
    keys: range
    rows: slice
    columns: slice

    @property
    def places(self) -> slice:
        """Which of all keys they are."""
        return slice(self.keys.start, self.keys.stop)


def attend(part: Part, at: Places) -> Tensor:
    """Return the context of the device's queries.

    Args:
        part: the device's part of the call, with the keys of this device, in order.
        at: the queries and keys that it serves.
    """
    dtype, keys = torch.promote_types(part.query.dtype, torch.float32), part.key.shape[1] * at.devices
    key, value = part.key, None if part.value is part.key else part.value
    if at.is_balanced:
        part = at.exchanged(part)
        key = at.to_balanced(key, 1)
        value = value if value is None else at.to_balanced(value, 1)
    ring = Ring(at, keys, part.mask, part.keep, part.scale, part.softcap, part.dropout, part.implementation)
    context, sums = _Ring.apply(
        ring, part.query.to(dtype), key.to(dtype), None if value is None else value.to(dtype), part.bias
    )
    if part.sinks is not None:
        # They are counted once, when all keys are.
        sees = sums != -torch.inf
        # exp(sums) / (exp(sums) + exp(sink)): the share of the keys where the sink joins the softmax.
        share = torch.sigmoid(torch.where(sees, sums, 0.0) - part.sinks.to(dtype)[:, None])
        context = context * rearrange(torch.where(sees, share, 0.0), "b h t -> b t h 1")
    context = context.to(part.query.dtype)
    return at.in_order(context, 1) if at.is_balanced else context


class _Ring(torch.autograd.Function):
    """Context ``(b, t, h, c)`` and logarithms of sums ``(b, h, t)``; a value of None is the key."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, ring: Ring, query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        width = (key if value is None else value).shape[-1]
        context = query.new_zeros((*query.shape[:3], width))
        sums = query.new_full((query.shape[0], query.shape[2], query.shape[1]), -torch.inf)
        block_arrays = [key] if value is None else [key, value]
        for hop in range(ring.at.devices):
            if hop:
                block_arrays = to_next(block_arrays, ring.at.group, ring.at.rank, ring.at.devices)
            for block in ring.blocks(hop, query.shape[1], _rows_at_once(query, block_arrays[0])):
                more, block_result = _attend(ring, block, query, block_arrays[0], block_arrays[-1], bias)
                old = sums[:, :, block.rows]
                together = torch.logaddexp(old, block_result)
                context[:, block.rows] *= _share(old, together)
                context[:, block.rows] += more * _share(block_result, together)
                sums[:, :, block.rows] = together
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, bias, context, sums)
        return context, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, d_context: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        query, key, value, bias, context, sums = ctx.saved_tensors
        block_arrays = [key] if value is None else [key, value]
        back = [torch.zeros_like(one) for one in block_arrays]
        d_query = torch.zeros_like(query)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=query.dtype)
        # The sum of weights * d_weights over all keys is d_context . context: it needs no key (arXiv 2205.14135).
        inside = d_sums - rearrange((d_context * context).sum(-1), "b t h -> b h t")
        groups = query.shape[2] // key.shape[2]
        for hop in range(ring.at.devices):
            if hop:
                moved = to_next([*block_arrays, *back], ring.at.group, ring.at.rank, ring.at.devices)
                block_arrays, back = moved[: len(block_arrays)], moved[len(block_arrays) :]
            for block in ring.blocks(hop, query.shape[1], _rows_at_once(query, block_arrays[0])):
                rows, columns = block.rows, block.columns
                scores = _scores(ring, block, query, block_arrays[0], bias)
                weights = torch.exp(scores - _finite(sums[:, :, rows])[..., None])
                grouped = _grouped(d_context[:, rows], groups)
                kept = rearrange(_kept(ring, block, weights), "b (k g) t s -> b k g t s", g=groups)
                back[-1][:, columns] += einsum(kept, grouped, "b k g t s, b t k g c -> b s k c")
                d_weights = einsum(grouped, block_arrays[-1][:, columns], "b t k g c, b s k c -> b k g t s").flatten(
                    1, 2
                )
                d_scores = weights * (_kept(ring, block, d_weights) + inside[:, :, rows, None])
                if d_bias is not None:
                    _add(d_bias, d_scores, block)
                if ring.softcap is not None:
                    plain = _products(ring, block, query, block_arrays[0])
                    d_scores = d_scores * (1.0 - torch.tanh(plain / ring.softcap) ** 2)
                d_scores = rearrange(d_scores * ring.scale, "b (k g) t s -> b k g t s", g=groups)
                d_rows = einsum(d_scores, block_arrays[0][:, columns], "b k g t s, b s k c -> b t k g c").flatten(2, 3)
                d_query[:, rows] += d_rows
                asking = _grouped(query[:, rows], groups)
                back[0][:, columns] += einsum(d_scores, asking, "b k g t s, b t k g c -> b s k c")
        # After the last hop the gradients of keys are on the device before the one whose keys they are.
        if ring.at.devices > 1:
            back = to_next(back, ring.at.group, ring.at.rank, ring.at.devices)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return None, d_query, back[0], None if value is None else back[1], d_bias


def _rows_at_once(query: Tensor, key: Tensor) -> int:
    return max(1, MAX_SCORES // max(1, query.shape[0] * query.shape[2] * key.shape[1]))


def _attend(
    ring: Ring, block: Block, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Float[Tensor, "b t h c"], Float[Tensor, "b h t"]]:
    """Return the context of a block's queries over its keys, and the logarithms of their sums."""
    mask = block_of(ring.mask, block.queries, block.keys, query.device)
    part = None if bias is None else _of_block(bias, block)
    kept = None if ring.keep is None else Drawn(_of_block(ring.keep, block))
    arrays = query[:, block.rows], key[:, block.columns], value[:, block.columns]
    call = KernelCall(*arrays, mask, part, ring.scale, ring.softcap, None, ring.dropout, kept, False)
    pair: tuple[Tensor, Tensor] = implementations.choose_with_sums(call, ring.implementation).attend_with_lse(call)
    return pair


def _products(ring: Ring, block: Block, query: Tensor, key: Tensor) -> Float[Tensor, "b h t s"]:
    key = key[:, block.columns]
    grouped = _grouped(query[:, block.rows], query.shape[2] // key.shape[2])
    return einsum(grouped, key, "b t k g c, b s k c -> b k g t s").flatten(1, 2) * ring.scale


def _scores(ring: Ring, block: Block, query: Tensor, key: Tensor, bias: Tensor | None) -> Float[Tensor, "b h t s"]:
    """Return the scores of a block, minus infinity where a key is hidden."""
    scores = _products(ring, block, query, key)
    if ring.softcap is not None:
        scores = ring.softcap * torch.tanh(scores / ring.softcap)
    if bias is not None:
        scores = scores + _of_block(bias, block).to(scores.dtype)
    mask = block_of(ring.mask, block.queries, block.keys, query.device)
    if mask is None:
        return scores
    device = query.device
    rows, columns = torch.arange(len(block.queries), device=device), torch.arange(len(block.keys), device=device)
    return torch.where(mask.allowed(rows[:, None], columns[None, :]), scores, -torch.inf)


def _kept(ring: Ring, block: Block, weights: Float[Tensor, "b h t s"]) -> Float[Tensor, "b h t s"]:
    """Apply the dropout mask to weights, or to their gradients: zero the dropped ones, and scale the others."""
    if ring.keep is None:
        return weights
    return torch.where(_of_block(ring.keep, block), weights / (1.0 - ring.dropout), 0.0)


def _of_block(array: Tensor, block: Block) -> Tensor:
    """Return the part of an operand ``(b, h, t, s)`` of the scores that belongs to a block."""
    if array.shape[2] > 1:
        array = array[:, :, block.rows]
    return array[..., block.places] if array.shape[3] > 1 else array


def _add(total: Tensor, part: Tensor, block: Block) -> None:
    """Add a block's contribution to the gradient of an operand of the scores, summed over axes it lacks."""
    rows = _of_block(total, block)
    rows += part.sum_to_size(rows.shape)


def _grouped(array: Float[Tensor, "b t h c"], groups: int) -> Float[Tensor, "b t k g c"]:
    return rearrange(array, "b t (k g) c -> b t k g c", g=groups)


def _finite(sums: Tensor) -> Tensor:
    """Return logarithms of sums, 0 where no key is seen: there are no weights there then, and no NaN."""
    return torch.where(sums == -torch.inf, 0.0, sums)


def _share(sums: Float[Tensor, "b h t"], together: Float[Tensor, "b h t"]) -> Float[Tensor, "b t h 1"]:
    """Return which share some keys have in all; none where no key is seen at all."""
    return rearrange(torch.exp(sums - _finite(together)), "b h t -> b t h 1")
