"""Positions in attention: rotary (arXiv 2104.09864), ALiBi (arXiv 2108.12409), relative bias (arXiv 1910.10683).

The twin is `torch_attn.positions`. Nothing is kept between calls: tables follow from the given positions. Letters: b
batch, t query position, s key position, h head, i pair of channels, c channel of a head.
"""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, UInt

from attn_bridge.specs import Alibi, LongRoPEScaling, NTKScaling, RelativeBias, Rotary, Temperature
from attn_bridge.specs.position import Sinusoids, sinusoid_rates

from .signatures import DType


def rotary_tables(
    rotary: Rotary, positions: Int[Array, "... T"], dim: int, dtype: DTypeLike
) -> tuple[Float[Array, "... T i"], Float[Array, "... T i"]]:
    """Return cosines and sines of the angles by which pairs of channels turn.

    Args:
        rotary: base and scaling.
        positions: integers ``(T,)`` or ``(B, T)``, or ``(rows, B, T)`` for the axes of `rotary`; any of them.
        dim: how many channels turn.
        dtype: float32 or float64, in which everything is computed.

    Returns:
        Two arrays ``(T, dim // 2)`` or ``(B, T, dim // 2)``, times the scaling's factor of the tables.
    """
    frequencies = jnp.asarray(rotary.frequencies(dim), dtype)
    scaling = rotary.scaling
    if isinstance(scaling, NTKScaling) and scaling.original_context is not None:
        tokens = positions.max().astype(dtype) + 1.0
        growth = scaling.factor * tokens / scaling.original_context - (scaling.factor - 1.0)
        exponents = jnp.asarray(scaling.exponents(dim), dtype)
        frequencies = frequencies * jnp.maximum(growth, 1.0) ** -exponents
    if isinstance(scaling, LongRoPEScaling):
        # Positions count from 0: this one is the first behind the context.
        is_long = positions.max() >= scaling.original_context
        stretched = scaling.long_frequencies(rotary.base, dim)
        frequencies = jnp.where(is_long, jnp.asarray(stretched, dtype), frequencies)
    if rotary.axes is not None and positions.ndim == 3:  # each pair of channels turns by one of the rows
        rows = jnp.asarray(rotary.rows(dim))
        at = rearrange(positions[rows], "i b t -> b t i")
    else:
        at = positions[..., None]
    angles = at.astype(dtype) * frequencies
    return jnp.cos(angles) * rotary.table_factor, jnp.sin(angles) * rotary.table_factor


def apply_rotary(
    x: Float[Array, "B T H D"], cos: Float[Array, "... T i"], sin: Float[Array, "... T i"], pairing: str
) -> Float[Array, "B T H D"]:
    """Turn the first channels of every head, as many as the tables are for; the rest stays.

    Args:
        x: ``(B, T, H, D)``.
        cos: ``(T, i)`` or ``(B, T, i)``; turns ``2 * i`` channels.
        sin: like `cos`.
        pairing: ``"half"``, ``"interleaved"`` or ``"reversed"``, see `attn_bridge.specs.Rotary`.

    Returns:
        Like `x`; computed in the dtype of the tables, rounded once.
    """
    turning, rest = x[..., : 2 * cos.shape[-1]].astype(cos.dtype), x[..., 2 * cos.shape[-1] :]
    cos, sin = cos[..., None, :], (-sin if pairing == "reversed" else sin)[..., None, :]
    if pairing != "interleaved":
        first, second = rearrange(turning, "b t h (two i) -> two b t h i", two=2)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    else:
        first, second = rearrange(turning, "b t h (i two) -> two b t h i", two=2)
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], -1)
        turned = rearrange(turned, "b t h i two -> b t h (i two)")
    return jnp.concatenate([turned.astype(x.dtype), rest], -1) if rest.shape[-1] else turned.astype(x.dtype)


def sinusoids(kind: Sinusoids, positions: Int[Array, "... T"], dim: int, dtype: DTypeLike) -> Float[Array, "... T d"]:
    """Return the sines, then the cosines of positions.

    Args:
        kind: of the waves.
        positions: integers ``(T,)`` or ``(B, T)``.
        dim: how many numbers a position has.
        dtype: float32 or float64, in which everything is computed.

    Returns:
        ``(T, dim)`` or ``(B, T, dim)``.
    """
    rates = jnp.asarray(sinusoid_rates(kind, dim), dtype)
    angles = positions[..., None].astype(dtype) * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def alibi_bias(
    num_heads: int, query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"], dtype: DTypeLike
) -> Float[Array, "... H T S"]:
    """Return ALiBi's addend of the scores: minus the slope of the head times the distance.

    Args:
        num_heads: slopes are those of this number of heads.
        query_positions: integers ``(T,)`` or ``(B, T)``.
        key_positions: integers ``(S,)`` or ``(B, S)``.
        dtype: float32 or float64.

    Returns:
        ``(H, T, S)``, or ``(B, H, T, S)`` where positions have a batch axis.
    """
    slopes = jnp.asarray(Alibi().slopes(num_heads), dtype)
    size, is_later = (array[..., None, :, :] for array in _distances(query_positions, key_positions))
    size = size.astype(dtype)
    # The published code adds slope * key position, which differs by one number per query, and softmax cancels that: a
    # later key gets more, not less.
    return -slopes[:, None, None] * jnp.where(is_later, -size, size)


def _distances(
    query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> tuple[UInt[Array, "... T S"], Bool[Array, "... T S"]]:
    """Return how far every key is from every query, and whether it is later; of any two positions of 32 bits."""
    dtype = jnp.promote_types(query_positions.dtype, key_positions.dtype)
    query, key = query_positions[..., :, None].astype(dtype), key_positions[..., None, :].astype(dtype)
    # A difference that wraps around has the bits of the right unsigned number.
    size = jnp.where(key > query, key - query, query - key)
    return size.view(f"uint{8 * dtype.itemsize}"), key > query


def apply_temperature(
    query: Float[Array, "B T H D"], temperature: Temperature, positions: Int[Array, "... T"], dtype: DType
) -> Float[Array, "B T H D"]:
    """Multiply queries by the factor of their positions.

    Args:
        query: ``(B, T, H, D)``.
        temperature: rate and interval of the growth.
        positions: integers ``(T,)`` or ``(B, T)``; those of padding may be negative, and count as 0.
        dtype: float32 or float64, in which the factor is computed.
    """
    steps = jnp.maximum(positions + temperature.offset, 0) // temperature.interval
    factor = (1.0 + temperature.rate * jnp.log1p(steps.astype(dtype))).astype(query.dtype)[..., None, None]
    return query * factor


def relative_buckets(
    position: RelativeBias, query_positions: Int[Array, "... T"], key_positions: Int[Array, "... S"]
) -> Int[Array, "... T S"]:
    """Return the bucket of every pair of query and key: the row of the table of biases.

    Args:
        position: buckets and directions.
        query_positions: integers ``(T,)`` or ``(B, T)``.
        key_positions: integers ``(S,)`` or ``(B, S)``.

    Returns:
        Integers ``(T, S)``, or ``(B, T, S)`` where positions have a batch axis.
    """
    size, is_later = _distances(query_positions, key_positions)
    bounds = jnp.asarray(position.bounds(), size.dtype)
    if not position.bidirectional:
        return jnp.searchsorted(bounds, jnp.where(is_later, 0, size), side="right")
    buckets = jnp.searchsorted(bounds, size, side="right")
    return jnp.where(is_later, buckets + position.num_per_direction, buckets)


def relative_bias(
    table: Float[Array, "buckets H"], buckets: Int[Array, "... T S"], dtype: DType
) -> Float[Array, "... H T S"]:
    """Return the relative bias of the scores.

    Args:
        table: number per bucket and head.
        buckets: rows of the table, of `relative_buckets`.
        dtype: float32 or float64, in which gradients of a row are added up.

    Returns:
        ``(H, T, S)``, or ``(B, H, T, S)`` where `buckets` have a batch axis.
    """
    return rearrange(table.astype(dtype)[buckets], "... t s h -> ... h t s")
