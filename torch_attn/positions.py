"""Positions in attention: rotary (arXiv 2104.09864), ALiBi (arXiv 2108.12409), relative bias (arXiv 1910.10683).

The twin is `jax_attn.positions`. Nothing is kept between calls: tables follow from the given positions. Letters: b
batch, t query position, s key position, h head, i pair of channels, c channel of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attn_bridge.specs import Alibi, LongRoPEScaling, NTKScaling, RelativeBias, Rotary, Temperature
from attn_bridge.specs.position import Sinusoids, sinusoid_rates

from .shards import is_sharded, on_parts
from .signatures import DType

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def rotary_tables(
    rotary: Rotary, positions: Int[Tensor, "... T"], dim: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "... T i"], Float[Tensor, "... T i"]]:
    """Return cosines and sines of the angles by which pairs of channels turn.

    Args:
        rotary: base and scaling.
        positions: integers ``(T,)`` or ``(B, T)``, or ``(rows, B, T)`` for the axes of `rotary`; any of them.
        dim: how many channels turn.
        dtype: float32 or float64, in which everything is computed.

    Returns:
        Two arrays ``(T, dim // 2)`` or ``(B, T, dim // 2)``, times the scaling's factor of the tables.
    """
    frequencies = torch.as_tensor(rotary.frequencies(dim), device=positions.device).to(dtype)
    scaling = rotary.scaling
    if isinstance(scaling, NTKScaling) and scaling.original_context is not None:
        tokens = positions.max().to(dtype) + 1.0
        growth = scaling.factor * tokens / scaling.original_context - (scaling.factor - 1.0)
        exponents = torch.as_tensor(scaling.exponents(dim), device=positions.device).to(dtype)
        frequencies = frequencies * torch.clamp(growth, min=1.0) ** -exponents
    if isinstance(scaling, LongRoPEScaling):
        # Positions count from 0: this one is the first behind the context.
        is_long = positions.max() >= scaling.original_context
        stretched = scaling.long_frequencies(rotary.base, dim)
        stretched = torch.as_tensor(stretched, device=positions.device).to(dtype)
        frequencies = torch.where(is_long, stretched, frequencies)
    if rotary.axes is not None and positions.ndim == 3:  # each pair of channels turns by one of the rows
        rows = torch.tensor(rotary.rows(dim), device=positions.device)
        at = rearrange(positions[rows], "i b t -> b t i")
    else:
        at = positions[..., None]
    angles = at.to(dtype) * frequencies
    return torch.cos(angles) * rotary.table_factor, torch.sin(angles) * rotary.table_factor


def apply_rotary(
    x: Float[Tensor, "B T H D"], cos: Float[Tensor, "... T i"], sin: Float[Tensor, "... T i"], pairing: str
) -> Float[Tensor, "B T H D"]:
    """Turn the first channels of every head, as many as the tables are for; the rest stays.

    Args:
        x: ``(B, T, H, D)``.
        cos: ``(T, i)`` or ``(B, T, i)``; turns ``2 * i`` channels.
        sin: like `cos`.
        pairing: ``"half"``, ``"interleaved"`` or ``"reversed"``, see `attn_bridge.specs.Rotary`.

    Returns:
        Like `x`; computed in the dtype of the tables, rounded once.
    """
    if is_sharded(x):
        return on_parts(
            lambda x, cos, sin: apply_rotary(x, cos[..., 0, :], sin[..., 0, :], pairing),
            x,
            cos[..., None, :],
            sin[..., None, :],
        )
    turning, rest = x[..., : 2 * cos.shape[-1]].to(cos.dtype), x[..., 2 * cos.shape[-1] :]
    cos, sin = cos[..., None, :], (-sin if pairing == "reversed" else sin)[..., None, :]
    if pairing != "interleaved":
        first, second = rearrange(turning, "b t h (two i) -> two b t h i", two=2)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    else:
        first, second = rearrange(turning, "b t h (i two) -> two b t h i", two=2)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
        turned = rearrange(turned, "b t h i two -> b t h (i two)")
    return torch.cat([turned.to(x.dtype), rest], -1) if rest.shape[-1] else turned.to(x.dtype)


def sinusoids(kind: Sinusoids, positions: Int[Tensor, "... T"], dim: int, dtype: DType) -> Float[Tensor, "... T d"]:
    """Return the sines, then the cosines of positions.

    Args:
        kind: of the waves.
        positions: integers ``(T,)`` or ``(B, T)``.
        dim: how many numbers a position has.
        dtype: float32 or float64, in which everything is computed.

    Returns:
        ``(T, dim)`` or ``(B, T, dim)``.
    """
    rates = torch.as_tensor(sinusoid_rates(kind, dim), device=positions.device).to(dtype)
    angles = positions[..., None].to(dtype) * rates
    return torch.cat([torch.sin(angles), torch.cos(angles)], -1)


def alibi_bias(
    num_heads: int, query_positions: Int[Tensor, "... T"], key_positions: Int[Tensor, "... S"], dtype: torch.dtype
) -> Float[Tensor, "... H T S"]:
    """Return ALiBi's addend of the scores: minus the slope of the head times the distance.

    Args:
        num_heads: slopes are those of this number of heads.
        query_positions: integers ``(T,)`` or ``(B, T)``.
        key_positions: integers ``(S,)`` or ``(B, S)``.
        dtype: float32 or float64.

    Returns:
        ``(H, T, S)``, or ``(B, H, T, S)`` where positions have a batch axis.
    """
    slopes = torch.as_tensor(Alibi().slopes(num_heads), device=query_positions.device).to(dtype)
    size, is_later = (array[..., None, :, :] for array in _distances(query_positions, key_positions))
    size = size.to(dtype)
    # The published code adds slope * key position, which differs by one number per query, and softmax cancels that: a
    # later key gets more, not less.
    return -slopes[:, None, None] * torch.where(is_later, -size, size)


def _distances(
    query_positions: Int[Tensor, "... T"], key_positions: Int[Tensor, "... S"]
) -> tuple[Int[Tensor, "... T S"], Bool[Tensor, "... T S"]]:
    """Return how far every key is from every query, and whether it is later; of any two positions of 32 bits."""
    later = key_positions[..., None, :].long() - query_positions[..., :, None].long()
    return torch.abs(later), later > 0


def apply_temperature(
    query: Float[Tensor, "B T H D"], temperature: Temperature, positions: Int[Tensor, "... T"], dtype: DType
) -> Float[Tensor, "B T H D"]:
    """Multiply queries by the factor of their positions.

    Args:
        query: ``(B, T, H, D)``.
        temperature: rate and interval of the growth.
        positions: integers ``(T,)`` or ``(B, T)``; those of padding may be negative, and count as 0.
        dtype: float32 or float64, in which the factor is computed.
    """
    steps = torch.clamp(positions + temperature.offset, min=0) // temperature.interval
    factor = (1.0 + temperature.rate * torch.log1p(steps.to(dtype))).to(query.dtype)[..., None, None]
    return on_parts(torch.mul, query, factor)


def relative_buckets(
    position: RelativeBias, query_positions: Int[Tensor, "... T"], key_positions: Int[Tensor, "... S"]
) -> Int[Tensor, "... T S"]:
    """Return the bucket of every pair of query and key: the row of the table of biases.

    Args:
        position: buckets and directions.
        query_positions: integers ``(T,)`` or ``(B, T)``.
        key_positions: integers ``(S,)`` or ``(B, S)``.

    Returns:
        Integers ``(T, S)``, or ``(B, T, S)`` where positions have a batch axis.
    """
    size, is_later = _distances(query_positions, key_positions)
    bounds = torch.tensor(position.bounds(), device=size.device)
    if not position.bidirectional:
        return torch.bucketize(torch.where(is_later, 0, size), bounds, right=True)
    buckets = torch.bucketize(size, bounds, right=True)
    return torch.where(is_later, buckets + position.num_per_direction, buckets)


def relative_bias(
    table: Float[Tensor, "buckets H"], buckets: Int[Tensor, "... T S"], dtype: DType
) -> Float[Tensor, "... H T S"]:
    """Return the relative bias of the scores.

    Args:
        table: number per bucket and head.
        buckets: rows of the table, of `relative_buckets`.
        dtype: float32 or float64, in which gradients of a row are added up.

    Returns:
        ``(H, T, S)``, or ``(B, H, T, S)`` where `buckets` have a batch axis.
    """
    if is_sharded(table):
        return _bias_by_heads(table, buckets, dtype)
    return rearrange(nn.functional.embedding(buckets, table.to(dtype)), "... t s h -> ... h t s")


def _bias_by_heads(table: DTensor, buckets: Int[Tensor, "... T S"], dtype: DType) -> Tensor:
    """Return the bias that devices share: each computes that of its part of the heads."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    cuts = [one if one == Shard(1) else Replicate() for one in table.placements]
    part = relative_bias(table.redistribute(placements=cuts).to_local(), buckets, dtype)
    by_heads = [Shard(part.ndim - 3) if one == Shard(1) else one for one in cuts]
    return DTensor.from_local(part, table.device_mesh, by_heads, run_check=False)
