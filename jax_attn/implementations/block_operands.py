"""The operands of a call of `blocked`, the parts of them that a step needs, and products of such parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import Array, lax
from jax.extend import random as generators
from jax.typing import DTypeLike

from .block_plan import BlockPlan, Columns

State = TypeVar("State")

PARTS = 16
"""Parts that keys are summed in: the rounding error of a sum grows with the root of its length."""


def false_of(operands: object) -> Array:
    """Return False, varying along the same axes of a `jax.shard_map` as any operand, as loops inside require."""
    # x ^ x is False for any number, and no constant to JAX: it varies along the axes along which x does.
    firsts = (array.ravel()[:1].astype(bool) for array in jax.tree.leaves(operands))
    return functools.reduce(jnp.logical_or, (first ^ first for first in firsts)).any()


def varying_alike(operands: State) -> State:
    """Return arrays that all vary along the axes of a `jax.shard_map` along which one does."""
    return varying_with(operands, operands)


def varying_with(operands: object, arrays: State) -> State:
    """Return arrays, such as those that a loop begins with, that vary along the same axes as any operand."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    never = false_of(operands)
    return jax.tree.map(lambda array: jnp.where(never, array, array), arrays)


def _product(left: Array, axis: int, right: Array, other: int) -> Array:
    """Return the matrix product of each head over an axis of either side; one head needs no batch, which is slower.

    Where a side is narrow (bfloat16), the other one is rounded to it, and the products are summed in float32.
    """
    wide = None
    if jnp.bfloat16 in (left.dtype, right.dtype):
        left, right, wide = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16), jnp.float32
    if left.shape[0] == 1:
        axes = (((axis - 1,), (other - 1,)), ((), ()))
        return lax.dot_general(left[0], right[0], axes, preferred_element_type=wide)[None]
    return lax.dot_general(left, right, (((axis,), (other,)), ((0,), (0,))), preferred_element_type=wide)


def times(left: Array, right: Array) -> Array:
    """Return ``left @ right`` of each head."""
    return _product(left, 2, right, 1)


def times_transposed(left: Array, right: Array) -> Array:
    """Return ``left @ right.T`` of each head."""
    return _product(left, 2, right, 2)


def transposed_times(left: Array, right: Array) -> Array:
    """Return ``left.T @ right`` of each head."""
    return _product(left, 1, right, 1)


def sum_over_keys(block: Array) -> Array:
    """Return the sum over the keys of a block with columns first, ``(n, 1, r)``.

    It is put together from sums of parts, which rounds less; those are a matrix product, faster than a sum on a CPU.
    """
    height = block.shape[1]
    part_of_key = jnp.arange(height) // -(-height // PARTS)
    is_in_part = (jnp.arange(PARTS)[:, None] == part_of_key).astype(block.dtype)
    return times(jnp.broadcast_to(is_in_part, (block.shape[0], *is_in_part.shape)), block).sum(1, keepdims=True)


def swap_last_axes(block: Array) -> Array:
    """Return a block with columns first, or back."""
    return jnp.swapaxes(block, 1, 2)


def pad(array: Array, axis: int, block: int, value: float = 0.0) -> Array:
    """Return the array filled up along an axis to a whole number of blocks."""
    missing = -array.shape[axis] % block
    widths = [(0, missing if one == axis else 0) for one in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value) if missing else array


class Operands:
    """The operands of a call with heads in front, filled up to whole blocks, and the parts of them a step needs.

    ``first`` is the first of the query heads that are worked on together, ``i`` the number of a block of rows, ``j``
    neighbouring columns. With `narrow`, operands of bfloat16 stay that where the plan allows it.
    """

    def __init__(
        self,
        plan: BlockPlan,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        arrays: tuple[Array, ...],
        seed: Array | None,
        dtype: DTypeLike,
        *,
        narrow: bool = False,
    ):
        self.plan, self.dtype, self.seed = plan, dtype, seed
        self.narrow = narrow and plan.narrow and all(one.dtype == jnp.bfloat16 for one in (query, key, value))
        self.scales_scores = self.narrow and abs(math.frexp(plan.scale)[0]) != 0.5  # else it rounds no query
        self.query = pad(rearrange(query, "b t h c -> (b h) t c"), 1, plan.rows)
        self.key = pad(rearrange(key, "b s h c -> (b h) s c"), 1, plan.columns)
        self.value = pad(rearrange(value, "b s h c -> (b h) s c"), 1, plan.columns)
        self.bias = None if bias is None else self._whole_blocks(bias)
        self.arrays = tuple(map(self._whole_blocks, arrays))
        shape = plan.shape
        self.group = shape.heads // shape.key_heads
        self.key_together = max(1, plan.together // self.group)
        self.never = false_of(query) if jax.sharding.get_abstract_mesh().manual_axes else None
        self.firsts = jnp.arange(0, shape.batch * shape.heads, plan.together, dtype=jnp.int32)
        self.tables = [np.asarray(table, np.int32) for table in plan.tables]

    def _whole_blocks(self, array: Array) -> Array:
        rows = array if array.shape[2] == 1 else pad(array, 2, self.plan.rows)
        return rows if rows.shape[3] == 1 else pad(rows, 3, self.plan.columns)

    def filled(self, shape: tuple[int, ...], value: float) -> Array:
        """Return an array to begin a loop with."""
        array = jnp.full(shape, value, self.dtype)
        return array if self.never is None else jnp.where(self.never, array, array)

    # ---- heads

    def take(self, array: Array, first: Array) -> Array:
        """Return the query heads from `first` on that are worked on together."""
        return lax.dynamic_slice_in_dim(array, first, self.plan.together, 0)

    def queries(self, first: Array) -> Array:
        """Return the queries ``(n, rows, c)``, scaled where that rounds nothing."""
        queries = self.take(self.query, first).astype(self.dtype) * (1.0 if self.scales_scores else self.plan.scale)
        return queries.astype(jnp.bfloat16) if self.narrow else queries

    def keys(self, first: Array) -> Array:
        """Return the keys ``(n, columns, c)`` of the heads; those that share them read one copy."""
        return self._shared(self.key, first)

    def values(self, first: Array) -> Array:
        """Return the values ``(n, columns, c)`` of the heads."""
        return self._shared(self.value, first)

    def _shared(self, array: Array, first: Array) -> Array:
        array = lax.dynamic_slice_in_dim(array, first // self.group, self.key_together, 0)
        array = array if self.narrow else array.astype(self.dtype)
        return jnp.repeat(array, self.plan.together // self.key_together, 0)

    def add_keys(self, total: Array, first: Array, part: Array) -> Array:
        """Add the gradients of keys or values, summed over the query heads that share them."""
        part = rearrange(part, "(k g) s c -> k g s c", k=self.key_together).sum(1)
        start = first // self.group
        old = lax.dynamic_slice_in_dim(total, start, self.key_together, 0)
        return lax.dynamic_update_slice_in_dim(total, old + part, start, 0)

    def sequence_of(self, first: Array) -> Array:
        """Return the place in the batch of each head that is worked on."""
        return (first + jnp.arange(self.plan.together)) // self.plan.shape.heads

    def head_of(self, first: Array) -> Array:
        """Return the number of each head that is worked on."""
        return (first + jnp.arange(self.plan.together)) % self.plan.shape.heads

    # ---- blocks

    def rows_of(self, array: Array, i: Array | int) -> Array:
        """Return a block of rows."""
        return lax.dynamic_slice_in_dim(array, i * self.plan.rows, self.plan.rows, 1)

    def columns_of(self, array: Array, j: Columns) -> Array:
        """Return some columns."""
        return lax.dynamic_slice_in_dim(array, j.start, j.width, 1)

    def add_columns(self, total: Array, j: Columns, part: Array) -> Array:
        """Add to some columns."""
        return lax.dynamic_update_slice_in_dim(total, self.columns_of(total, j) + part, j.start, 1)

    def over_rows(self, row_block: Callable[[Array | int], State]) -> State:
        """Apply a function to each block of rows, and stack its results."""
        if not self.plan.unrolled:
            return lax.map(row_block, jnp.arange(self.plan.row_blocks))
        return jax.tree.map(lambda *parts: jnp.stack(parts), *map(row_block, range(self.plan.row_blocks)))

    def over_columns(self, i: Array | int, step: Callable[[bool, Columns, State], State], start: State) -> State:
        """Do a step for all columns that a block of rows sees, a block at a time in a rolled loop."""
        if self.plan.unrolled:
            kept = start
            for masked, columns in self.plan.runs(i):
                kept = step(masked, columns, kept)
            return kept
        listed, begins, middles, ends = (jnp.asarray(table) for table in self.tables)

        def at(masked: bool) -> Callable[[Array, State], State]:
            width = self.plan.columns
            return lambda at, kept: step(masked, Columns(listed[at] * width, width), kept)

        if (self.tables[1] != self.tables[2]).any():
            start = lax.fori_loop(begins[i], middles[i], at(False), start)
        if (self.tables[2] != self.tables[3]).any():
            start = lax.fori_loop(middles[i], ends[i], at(True), start)
        return start

    def scores(
        self, first: Array, i: Array | int, j: Columns, q: Array, k: Array, masked: bool, columns_first: bool = False
    ) -> tuple[Array, Array | None]:
        """Return the scores of a block, and the tanh of softcap before its factor."""
        plan = self.plan
        lie = swap_last_axes if columns_first else lambda block: block
        scores, capped = times_transposed(k, q) if columns_first else times_transposed(q, k), None
        if self.scales_scores:
            scores = scores * self.plan.scale
        if plan.softcap is not None:
            capped = jnp.tanh(scores / plan.softcap)
            scores = plan.softcap * capped
        if self.bias is not None:
            scores = scores + lie(self._block_of(self.bias, first, i, j).astype(self.dtype))
        if masked:
            allowed = self._allowed(first, i, j)
            scores = jnp.where(lie(allowed if allowed.ndim == 3 else allowed[None]), scores, -jnp.inf)
        return scores, capped

    def _allowed(self, first: Array, i: Array | int, j: Columns) -> Array:
        """Return which pairs of a block may attend; columns that only fill it up may not."""
        plan = self.plan
        rows = i * plan.rows + jnp.arange(plan.rows)[:, None]
        columns = j.start + jnp.arange(j.width)[None, :]
        inside = columns < plan.shape.keys
        if plan.mask is None:
            return inside
        blocks = iter([self._block_of(array, first, i, j) for array in self.arrays])
        return plan.mask.with_arrays(lambda _: next(blocks)).allowed(rows, columns) & inside

    def _block_of(self, array: Array, first: Array, i: Array | int, j: Columns) -> Array:
        """Return the block ``(n, rows, columns)`` of an array ``(B, H, T, S)``, whose axes may be 1."""

        def one(sequence: Array, head: Array) -> Array:
            starts, sizes = self._place(array, sequence, head, i, j)
            return lax.dynamic_slice(array, starts, sizes)[0, 0]

        sequences, heads = self.sequence_of(first), self.head_of(first)
        if self.plan.together == 1:
            return one(sequences[0], heads[0])[None]
        return jax.vmap(one)(sequences, heads)

    def _place(
        self, array: Array, sequence: Array, head: Array, i: Array | int, j: Columns
    ) -> tuple[list[Array], list[int]]:
        at = (sequence, head, i * self.plan.rows, j.start)
        sizes = zip(at, array.shape, strict=True)
        starts = [jnp.asarray(0 if size == 1 else start, jnp.int32) for start, size in sizes]
        block = (1, 1, self.plan.rows, j.width)
        return starts, [min(size, whole) for size, whole in zip(block, array.shape, strict=True)]

    def add_bias(self, total: Array, first: Array, i: Array | int, j: Columns, part: Array) -> Array:
        """Add the gradients of a block to those of the bias, summed where the bias was broadcast."""
        starts, sizes = self._place(total, self.sequence_of(first)[0], self.head_of(first)[0], i, j)
        part = part[None]
        summed = part.sum([axis for axis in (2, 3) if sizes[axis] == 1 != part.shape[axis]], keepdims=True)
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, sizes) + summed, starts)

    def kept(self, first: Array, i: Array | int, j: Columns) -> Array:
        """Return the factors of dropout for a block: those of ``jax.random.bernoulli`` over ``(B, H, T, S)``.

        Partitionable Threefry draws an element from its place alone, so a block needs nothing but its own places.
        """
        assert self.seed is not None, "asked for where there is dropout"
        plan, shape = self.plan, self.plan.shape
        heads = (first + jnp.arange(plan.together)).astype(jnp.uint32)[:, None, None]
        rows = (i * plan.rows + jnp.arange(plan.rows)).astype(jnp.uint32)[:, None]
        columns = (j.start + jnp.arange(j.width)).astype(jnp.uint32)
        high, low = multiply(heads * np.uint32(shape.queries) + rows, shape.keys)
        low_word = low + columns
        # A sum of low words that is smaller than its summand has overflowed: carry.
        high = high + (low_word < low)
        high, low_word = (jnp.broadcast_to(one, (plan.together, plan.rows, j.width)) for one in (high, low_word))
        words = generators.threefry_2x32((self.seed[0], self.seed[1]), jnp.stack([high, low_word]).ravel())
        first_word, second_word = words.reshape(2, *low_word.shape)
        # 23 random bits behind the exponent of 1.0 are a number in [1, 2), as in `jax.random.uniform`.
        mantissa = ((first_word ^ second_word) >> np.uint32(9)) | np.uint32(0x3F800000)
        uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
        return jnp.where(uniform < np.float32(1.0 - plan.dropout), 1.0 / (1.0 - plan.dropout), 0.0).astype(self.dtype)


def multiply(words: Array, factor: int) -> tuple[Array, Array]:
    """Return the high and the low words of the 64-bit products of uint32 words and a number below 2**32."""
    # By halves of 16 bits: JAX has no integers of 64 bits unless jax_enable_x64 is set.
    low_factor, high_factor = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    low_words, high_words = words & np.uint32(0xFFFF), words >> np.uint32(16)
    low = low_words * low_factor
    middle = high_words * low_factor + (low >> np.uint32(16))
    other = low_words * high_factor + (middle & np.uint32(0xFFFF))
    high = high_words * high_factor + (middle >> np.uint32(16)) + (other >> np.uint32(16))
    return high, words * np.uint32(factor)
