"""Attention to keys that go round a ring of devices, one block at a time (arXiv 2310.01889).

Each device keeps its queries, meets the keys and values of all devices in turn, and puts together what it found by the
logarithms of sums that blocks give. The gradient is written by hand: keys go round once more, with their gradients, so
that a device never holds more than one block of others.

Letters: b batch, t query position, s key position, h query head, k key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jaxtyping import Float

from attn_bridge.masks import Mask
from attn_bridge.sharding import turns

from .. import implementations
from ..implementations import Call
from ..implementations.block_operands import false_of
from ..implementations.reference import Drawn
from .block_masks import Views, columns, local_arrays, views_of


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is known of a ring before any number is.

    Attributes:
        axis: axis of the mesh that the devices are on.
        devices: how many there are.
        hops: how many turns there are: 1 where a device holds all keys, else as many as devices.
        queries: for each piece of a device's queries, where it starts, on each device.
        keys: the same of the pieces of keys that a device holds at first.
        mask: description with numbered places for arrays.
        scale: factor of the scores.
        softcap: as `functional.dot_product_attention` has it.
        dropout: rate.
        implementation: which one is asked for, None for the fastest.
    """

    axis: str | None
    devices: int
    hops: int
    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    mask: Mask | None
    scale: float
    softcap: float | None
    dropout: float
    implementation: str | None

    def key_starts(self, hop: int, piece: int) -> tuple[int, ...]:
        """Return where a piece of the keys starts that each device holds in a turn."""
        starts = self.keys[piece]
        return tuple(starts[turns(self.devices)[hop].owner(device, self.devices)] for device in range(self.devices))

    def forward(self, arrays: Arrays) -> Arrays:
        """Return what the device before this one holds."""
        pairs = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda array: lax.ppermute(array, self.axis, pairs), arrays)


Arrays = Any
"""Arrays of a device, in tuples."""


def attend(
    ring: Ring,
    query: Float[Array, "b t h c"],
    key: Float[Array, "b s k c"],
    value: Float[Array, "b s k c"],
    bias: Array | None,
    sinks: Float[Array, "h"] | None,
    arrays: tuple[Array, ...],
    keep: Array | None,
) -> Float[Array, "b t h c"]:
    """Return the context of a device's queries.

    Args:
        ring: who holds what.
        query: ``(b, t, h, c)``.
        key: ``(b, s, k, c)``, those that the device holds at first.
        value: ``(b, s, k, c)``.
        bias: ``(b, h, t, s)``, each axis 1 or the device's, keys all.
        sinks: ``(h,)``; they are counted once, at the end.
        arrays: those of the mask, like `bias`.
        keep: dropout mask, like `bias`.
    """
    operands = _varying_alike((query, key, value, bias, arrays, keep))
    context, sums = _attend(ring, *operands)
    if sinks is not None:
        sinks = sinks.astype(sums.dtype)[None, :, None]
        sees = sums != -jnp.inf
        share = jax.nn.sigmoid(jnp.where(sees, sums, 0.0) - sinks)
        context = context * rearrange(jnp.where(sees, share, 0.0), "b h t -> b t h 1")
    return context.astype(query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, query: Array, key: Array, value: Array, bias: Any, arrays: Any, keep: Any) -> Arrays:
    held = (key, value)
    pieces = [_piece(query, number, len(ring.queries), 1) for number in range(len(ring.queries))]
    found = [_nothing(piece, value) for piece in pieces]
    for hop in range(ring.hops):
        if hop:
            held = ring.forward(held)
        for number, piece in enumerate(pieces):
            rows = _rows(ring, number, bias, arrays, keep)
            for other in range(len(ring.keys)):
                views, block = _block(ring, hop, number, other, held, piece, rows)
                nothing = _nothing(piece, value)
                part = views.switch(
                    ring.axis,
                    lambda mask, block=block: block.run(mask, *block.operands),
                    lambda nothing=nothing: nothing,
                )
                found[number] = _merge(found[number], part)
    contexts, sums = zip(*found, strict=True)
    return jnp.concatenate(contexts, 1), jnp.concatenate(sums, 2)


def _attend_forward(ring: Ring, *operands: Any) -> tuple[Arrays, Any]:
    results = _attend(ring, *operands)
    return results, (operands, results)


def _attend_backward(ring: Ring, kept: Any, cotangents: Any) -> Any:
    (query, key, value, bias, arrays, keep), (context, sums) = kept
    d_context, d_sums = cotangents
    count, wide = len(ring.queries), context.dtype
    held, back = (key, value), _zeros_like((key, value), wide)
    d_bias = None if bias is None else _zeros_like(bias, wide)
    d_queries = [_zeros_like(_piece(query, number, count, 1), wide) for number in range(count)]
    for hop in range(ring.hops):
        if hop:
            held, back = ring.forward((held, back))
        for number in range(count):
            piece = _piece(query, number, count, 1)
            rows = _rows(ring, number, bias, arrays, keep)
            whole = [_piece(one, number, count, axis) for one, axis in ((context, 1), (sums, 2))]
            given = [_piece(one, number, count, axis) for one, axis in ((d_context, 1), (d_sums, 2))]
            for other in range(len(ring.keys)):
                views, block = _block(ring, hop, number, other, held, piece, rows)
                zeros = _zeros_like(block.operands, wide)

                def gradients(mask: Mask | None, block: Any = block, whole: Any = whole, given: Any = given) -> Any:
                    (part, part_sums), pull = jax.vjp(functools.partial(block.run, mask), *block.operands)
                    found = pull(_weighed(part, part_sums, *whole, *given))
                    return jax.tree.map(lambda array: array.astype(wide), found)

                d_query, d_key, d_value, d_columns = views.switch(ring.axis, gradients, lambda zeros=zeros: zeros)
                d_queries[number] = d_queries[number] + d_query
                back = tuple(
                    _add_piece(one, part, other, len(ring.keys), 1)
                    for one, part in zip(back, (d_key, d_value), strict=True)
                )
                if d_bias is not None:
                    d_bias = _add_block(d_bias, d_columns, number, count, block.key_start)
    if ring.hops > 1:
        back = ring.forward(back)
    d_key, d_value = (one.astype(array.dtype) for one, array in zip(back, (key, value), strict=True))
    d_bias = None if d_bias is None else d_bias.astype(bias.dtype)
    return jnp.concatenate(d_queries, 1).astype(query.dtype), d_key, d_value, d_bias, None, None


_attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A piece of queries and a piece of keys that meet in a turn.

    Attributes:
        ring: who holds what.
        operands: query, key, value and the bias of both.
        arrays: those of the mask, for both.
        keep: dropout mask of both.
        key_start: where the keys start.
    """

    ring: Ring
    operands: tuple[Any, ...]
    arrays: tuple[Array, ...]
    keep: Array | None
    key_start: Array

    def run(self, mask: Mask | None, query: Array, key: Array, value: Array, bias: Any) -> tuple[Array, Array]:
        """Return the context of the block, not rounded to 16 bits, and its sums."""
        ring, wide = self.ring, jnp.promote_types(query.dtype, jnp.float32)
        query, key, value = (array.astype(wide) for array in (query, key, value))
        mask = None if mask is None else mask.with_arrays(lambda place: self.arrays[place.number])
        rng = None if self.keep is None else Drawn(self.keep)
        call = Call(query, key, value, mask, bias, ring.scale, ring.softcap, None, ring.dropout, rng, False)
        context, sums = implementations.choose_with_sums(call, ring.implementation).attend_with_lse(call)
        return context, sums


def _block(
    ring: Ring, hop: int, number: int, other: int, held: Arrays, piece: Array, rows: tuple[Any, ...]
) -> tuple[Views, Block]:
    """Return the block where a piece of the queries meets one of the keys, and the views that devices have of it."""
    key, value = (_piece(one, other, len(ring.keys), 1) for one in held)
    starts, keys = ring.key_starts(hop, other), key.shape[1]
    views = views_of(ring.mask, piece.shape[1], keys, ring.queries[number], starts)
    start = jnp.asarray(starts)[0 if ring.axis is None else lax.axis_index(ring.axis)]
    bias, arrays, keep = rows
    bias, keep = (None if one is None else columns(one, start, keys) for one in (bias, keep))
    return views, Block(ring, (piece, key, value, bias), local_arrays(ring.mask, arrays, start, keys), keep, start)


def _rows(ring: Ring, number: int, bias: Any, arrays: tuple[Array, ...], keep: Any) -> tuple[Any, ...]:
    """Return the rows of a piece of the queries of what has rows."""

    def rows(array: Any) -> Any:
        return array if array is None or array.shape[2] == 1 else _piece(array, number, len(ring.queries), 2)

    return rows(bias), tuple(map(rows, arrays)), rows(keep)


def _piece(array: Array, number: int, count: int, axis: int) -> Array:
    size = array.shape[axis] // count
    return array if count == 1 else lax.slice_in_dim(array, number * size, (number + 1) * size, axis=axis)


def _add_piece(array: Array, part: Array, number: int, count: int, axis: int) -> Array:
    if count == 1:
        return array + part
    start = number * (array.shape[axis] // count)
    return array.at[(slice(None),) * axis + (slice(start, start + part.shape[axis]),)].add(part)


def _add_block(array: Array, part: Array, number: int, count: int, key_start: Array) -> Array:
    """Add what belongs to a piece of the rows and to the columns from `key_start` on."""
    starts: list[Any] = [0] * array.ndim
    if array.shape[2] > 1:
        starts[2] = number * (array.shape[2] // count)
    if array.shape[3] > 1:
        starts[3] = key_start
    old = lax.dynamic_slice(array, starts, part.shape)
    return lax.dynamic_update_slice(array, old + part, starts)


def _nothing(query: Array, value: Array) -> tuple[Array, Array]:
    """Return the context and the sums of queries that have met no key yet."""
    wide, never, (batch, queries, heads, _) = jnp.promote_types(query.dtype, jnp.float32), false_of(query), query.shape
    context = _filled(never, (batch, queries, heads, value.shape[3]), wide, 0.0)
    return context, _filled(never, (batch, heads, queries), wide, -jnp.inf)


def _merge(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Put together what queries found among some keys and among others."""
    (context, sums), (more, more_sums) = one, other
    together = jnp.logaddexp(sums, more_sums)
    return context * _share(sums, together) + more * _share(more_sums, together), together


def _share(sums: Array, together: Array) -> Array:
    """Return which share some keys have in all, ``(b, t, h, 1)``; none where no key is seen at all."""
    share = jnp.where(sums == -jnp.inf, 0.0, jnp.exp(sums - jnp.where(together == -jnp.inf, 0.0, together)))
    return rearrange(share, "b h t -> b t h 1")


def _weighed(
    part: Array, part_sums: Array, context: Array, sums: Array, d_context: Array, d_sums: Array
) -> tuple[Array, Array]:
    """Return what comes back to context and sums of a block from what comes back to those of all keys."""
    share = _share(part_sums, sums)
    of_context = rearrange((d_context * (part - context)).sum(-1, keepdims=True) * share, "b t h 1 -> b h t")
    return d_context * share, of_context + d_sums * rearrange(share, "b t h 1 -> b h t")


def _zeros_like(arrays: Arrays, dtype: Any) -> Arrays:
    never = false_of(arrays)
    return jax.tree.map(lambda array: _filled(never, array.shape, dtype, 0.0), arrays)


def _filled(never: Array, shape: tuple[int, ...], dtype: Any, value: float) -> Array:
    """Return an array of one number that varies along the axes of the mesh along which `never` does."""
    return jnp.where(never, jnp.asarray(1.0, dtype), jnp.full(shape, value, dtype))


def _varying_alike(arrays: Sequence[Any]) -> Any:
    """Return arrays that all vary along those axes of the mesh along which one does, as branches ask."""
    never = false_of(arrays)
    return jax.tree.map(lambda array: jnp.where(never, array, array), arrays)
