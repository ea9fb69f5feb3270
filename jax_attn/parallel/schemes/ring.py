"""Attention to keys that travel round a ring of devices, one block at a time (arXiv 2310.01889).

Each device keeps its queries, meets the keys and values of all devices in turn, and combines the results of blocks by
the logarithms of their sums. The gradient is written by hand: keys travel round once more, with their gradients, so
that a device never holds more than one block of others.

Letters: b batch, t query position, s key position, h query head, k key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jaxtyping import Float

from attn_bridge.masks import Mask
from attn_bridge.sharding import turns

from ... import implementations
from ...implementations import KernelCall
from ...implementations.block_operands import false_of, varying_alike
from ...implementations.derivatives.backward_only import REASON, backward_only
from ...implementations.reference import Drawn
from ..block_masks import Views, columns, local_arrays, views_of


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static part of a ring.

    Attributes:
        axis: axis of the mesh that the devices are on.
        devices: number of devices.
        hops: number of turns: 1 if a device holds all keys, else the number of devices.
        queries: for each piece of a device's queries, where it starts, on each device.
        keys: the same of the pieces of keys that a device holds at first.
        mask: description with numbered places for arrays.
        scale: factor of the scores.
        softcap: as in `functional.dot_product_attention`.
        dropout: rate.
        implementation: the requested one, None for the fastest.
        is_rolled: whether all turns but the first are one loop.
        precision: of products, that of the call, which may have ended when JAX traces the gradients.
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
    is_rolled: bool
    precision: str | None = dataclasses.field(default_factory=lambda: jax.config.jax_default_matmul_precision)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Turns that go together: with many scores all but the first are one loop, which holds one block at a time."""
        first, *others = range(self.hops)
        return ((first,), tuple(others)) if self.is_rolled and others else tuple((hop,) for hop in range(self.hops))

    def key_starts(self, hops: tuple[int, ...], piece: int) -> tuple[int, ...]:
        """Return where a piece of the keys starts that each device holds, for each of these turns."""
        starts, devices = self.keys[piece], range(self.devices)
        return tuple(starts[turns(self.devices)[hop].owner(device, self.devices)] for hop in hops for device in devices)

    def received(self, hops: tuple[int, ...], block: Arrays) -> Arrays:
        """Return the previous device's block of the turn before; in the first turn, the device's own."""
        return self.forward(block) if hops[0] > 0 else block

    def forward(self, arrays: Arrays) -> Arrays:
        """Return the previous device's arrays."""
        pairs = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        leaves, structure = jax.tree.flatten(arrays)
        parts = _parts_of(leaves) if self.is_rolled else 1

        def move(number: object, array: Array) -> Array:
            size = array.shape[1] // parts
            moved = lax.ppermute(lax.dynamic_slice_in_dim(array, number * size, size, 1), self.axis, pairs)
            return lax.dynamic_update_slice_in_dim(array, moved, number * size, 1)

        if parts == 1:
            return jax.tree.map(lambda array: lax.ppermute(array, self.axis, pairs), arrays)
        leaves = lax.fori_loop(0, parts, lambda number, moving: [move(number, one) for one in moving], leaves)
        return jax.tree.unflatten(structure, leaves)


PARTS = 16
"""Most parts of keys and values to move one after the other, each overwriting the one before: a second copy of all of
them would be most of a device's memory."""

LEAST_PART = 1 << 18
"""Bytes of a part: smaller ones take as long to send as these."""

FORWARD = f"method 'ring' {REASON}: give parallelize method='all_gather'"
"""Message that refuses `jax.jvp`: the gradient goes around the ring by hand-written code."""


Arrays = Any
"""Arrays of a device, in tuples."""


def _parts_of(arrays: Sequence[Array]) -> int:
    """Return in how many parts of their tokens arrays are moved, a power of two."""
    parts, tokens = 1, arrays[0].shape[1]
    most = min(PARTS, min(one.size * one.dtype.itemsize for one in arrays) // LEAST_PART)
    while 2 * parts <= most and tokens % (2 * parts) == 0:
        parts *= 2
    return parts


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
    query, key, value = (backward_only(FORWARD, operand) for operand in (query, key, value))
    operands = varying_alike((query, key, value, bias, arrays, keep))
    context, sums = _attend(ring, *operands)
    if sinks is not None:
        sinks = sinks.astype(sums.dtype)[None, :, None]
        sees = sums != -jnp.inf
        share = jax.nn.sigmoid(jnp.where(sees, sums, 0.0) - sinks)
        context = context * rearrange(jnp.where(sees, share, 0.0), "b h t -> b t h 1")
    return context.astype(query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: Ring,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    arrays: tuple[Array, ...],
    keep: Array | None,
) -> Arrays:
    count = len(ring.queries)
    pieces = [_piece(query, number, count, 1) for number in range(count)]
    rows = [_rows(ring, number, bias, arrays, keep) for number in range(count)]

    def turn(hops: tuple[int, ...], number: object, state: Arrays) -> Arrays:
        keys_and_values, partial_results = state
        keys_and_values, partial_results = ring.received(hops, keys_and_values), list(partial_results)
        for piece, other in itertools.product(range(count), range(len(ring.keys))):
            block = _block(ring, hops, number, piece, other, keys_and_values, pieces[piece], rows[piece])
            partial_results[piece] = block.views.switch(
                block.at, block.add_to, partial_results[piece], in_place=ring.is_rolled
            )
        return keys_and_values, partial_results

    state = (key, value), [_nothing(piece, value) for piece in pieces]
    _, partial_results = _run_turns(ring, turn, state)
    contexts, sums = zip(*partial_results, strict=True)
    return jnp.concatenate(contexts, 1), jnp.concatenate(sums, 2)


def _run_turns(ring: Ring, turn: Callable[..., Arrays], state: Arrays) -> Arrays:
    """Go through all turns: ``turn(hops, number, state)`` is one of `hops`, the one of that number."""
    for hops in ring.stages:
        if len(hops) == 1:
            state = turn(hops, 0, state)
        else:
            state = lax.fori_loop(0, len(hops), functools.partial(turn, hops), state)
    return state


def _attend_forward(ring: Ring, *operands: object) -> tuple[Arrays, Arrays]:
    with jax.default_matmul_precision(ring.precision):
        results = _attend(ring, *operands)
    return results, (operands, results)


def _attend_backward(ring: Ring, kept: Arrays, cotangents: Arrays) -> Arrays:
    (query, key, value, bias, arrays, keep), (context, sums) = kept
    count, wide = len(ring.queries), context.dtype
    pieces = [_piece(query, number, count, 1) for number in range(count)]
    rows = [_rows(ring, number, bias, arrays, keep) for number in range(count)]
    d_context, d_sums = cotangents
    # What comes back to a row is told apart from what its keys have in common.
    slope = rearrange((d_context * context).sum(-1), "b t h -> b h t")
    results = [
        (
            _piece(sums, number, count, 2),
            *(_piece(one, number, count, axis) for one, axis in ((d_context, 1), (slope, 2))),
            _piece(d_sums, number, count, 2),
        )
        for number in range(count)
    ]

    def turn(hops: tuple[int, ...], number: object, state: Arrays) -> Arrays:
        keys, back, d_queries, d_bias = state
        (keys, back), d_queries = ring.received(hops, (keys, back)), list(d_queries)
        for piece, other in itertools.product(range(count), range(len(ring.keys))):
            block = _block(ring, hops, number, piece, other, keys, pieces[piece], rows[piece])
            add = functools.partial(block.add_gradients, results=results[piece], piece=(piece, count), other=other)
            before = (d_queries[piece], back, d_bias)
            d_queries[piece], back, d_bias = block.views.switch(block.at, add, before)
        return keys, back, d_queries, d_bias

    d_bias = None if bias is None else _zeros_like(bias, wide)
    state = (key, value), _zeros_like((key, value), wide), [_zeros_like(piece, wide) for piece in pieces], d_bias
    with jax.default_matmul_precision(ring.precision):
        _, back, d_queries, d_bias = _run_turns(ring, turn, state)
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
        views: the masks that devices have of it.
        at: place of this device, and of the turn, in the views.
        operands: query, key, value and the bias of both.
        arrays: those of the mask, for both.
        keep: dropout mask of both.
        key_start: where the keys start.
    """

    ring: Ring
    views: Views
    at: Array | int
    operands: tuple[Array, Array, Array, Array | None]
    arrays: tuple[Array, ...]
    keep: Array | None
    key_start: Array

    def run(self, mask: Mask | None, operands: tuple[Array, Array, Array, Array | None]) -> tuple[Array, Array]:
        """Return the context of the block, not rounded to 16 bits, and its sums."""
        ring, (query, key, value, bias) = self.ring, operands
        wide = jnp.promote_types(query.dtype, jnp.float32)
        query, key, value = (array.astype(wide) for array in (query, key, value))
        mask = None if mask is None else mask.with_arrays(lambda slot: self.arrays[slot.number])
        rng = None if self.keep is None else Drawn(self.keep)
        call = KernelCall(query, key, value, mask, bias, ring.scale, ring.softcap, None, ring.dropout, rng, False)
        context, sums = implementations.choose_with_sums(call, ring.implementation).attend_with_lse(call)
        return context, sums

    def add_to(self, mask: Mask | None, before: tuple[Array, Array]) -> tuple[Array, Array]:
        """Merge the results of this block into those of earlier blocks."""
        return _merge(before, self.run(mask, self.operands))

    def add_gradients(
        self, mask: Mask | None, before: Arrays, results: Sequence[Array], piece: tuple[int, int], other: int
    ) -> Arrays:
        """Add the block's gradients to those of the queries, of the present keys and values, and of the bias.

        Args:
            mask: of the block.
            before: those gradients.
            results: sums of all keys, the gradients of context and sums, and the products of the two.
            piece: number of the queries' piece, and how many there are.
            other: number of the keys' piece.
        """
        d_query, back, d_bias = before
        (part, part_sums), pull = jax.vjp(lambda *operands: self.run(mask, operands), *self.operands)
        slopes = pull(_weighed(part, part_sums, *results))
        more, d_key, d_value, d_columns = jax.tree.map(lambda array: array.astype(part.dtype), slopes)
        back = tuple(
            _add_piece(one, new, other, len(self.ring.keys), 1) for one, new in zip(back, (d_key, d_value), strict=True)
        )
        if d_bias is not None:
            d_bias = _add_block(d_bias, d_columns, *piece, self.key_start)
        return d_query + more, back, d_bias


def _block(
    ring: Ring,
    hops: tuple[int, ...],
    number: Array | int,
    piece: int,
    other: int,
    keys_and_values: Arrays,
    query: Array,
    rows: tuple[Array | None, tuple[Array | None, ...], Array | None],
) -> Block:
    """Return the block where a piece of the queries meets one of the keys, in one of these turns."""
    key, value = (_piece(one, other, len(ring.keys), 1) for one in keys_and_values)
    starts, keys = ring.key_starts(hops, other), key.shape[1]
    views = views_of(ring.mask, query.shape[1], keys, ring.queries[piece] * len(hops), starts)
    at = number * ring.devices + (0 if ring.axis is None else lax.axis_index(ring.axis))
    start = jnp.asarray(starts)[at]
    bias, arrays, keep = rows
    bias, keep = (None if one is None else columns(one, start, keys) for one in (bias, keep))
    arrays = local_arrays(ring.mask, arrays, start, keys)
    return Block(ring, views, at, (query, key, value, bias), arrays, keep, start)


def _rows(
    ring: Ring, number: int, bias: Array | None, arrays: tuple[Array, ...], keep: Array | None
) -> tuple[Array | None, tuple[Array | None, ...], Array | None]:
    """Return the rows of a piece of the queries, of every array that has rows."""

    def rows(array: Array | None) -> Array | None:
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
    """Add the part of a piece of the rows, in the columns from `key_start` on."""
    starts: list[Array | int] = [0] * array.ndim
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


def _merge(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merge the results of queries over some keys and over others."""
    (context, sums), (more, more_sums) = earlier, later
    together = jnp.logaddexp(sums, more_sums)
    return context * _share(sums, together) + more * _share(more_sums, together), together


def _share(sums: Array, together: Array) -> Array:
    """Return which share some keys have in all, ``(b, t, h, 1)``; none where no key is seen at all."""
    share = jnp.where(sums == -jnp.inf, 0.0, jnp.exp(sums - jnp.where(together == -jnp.inf, 0.0, together)))
    return rearrange(share, "b h t -> b t h 1")


def _weighed(
    part: Array, part_sums: Array, sums: Array, d_context: Array, slope: Array, d_sums: Array
) -> tuple[Array, Array]:
    """Return the gradients of a block's context and sums from those of all keys."""
    share = _share(part_sums, sums)
    of_context = rearrange((d_context * part).sum(-1), "b t h -> b h t") - slope
    return d_context * share, (of_context + d_sums) * rearrange(share, "b t h 1 -> b h t")


def _zeros_like(arrays: Arrays, dtype: object) -> Arrays:
    never = false_of(arrays)
    return jax.tree.map(lambda array: _filled(never, array.shape, dtype, 0.0), arrays)


def _filled(never: Array, shape: tuple[int, ...], dtype: object, value: float) -> Array:
    """Return an array of one number that varies along the axes of the mesh along which `never` does."""
    return jnp.where(never, jnp.asarray(1.0, dtype), jnp.full(shape, value, dtype))
