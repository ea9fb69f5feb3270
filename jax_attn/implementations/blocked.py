"""Attention a block of scores at a time, in memory that grows with T, and only the blocks that somebody sees.

The softmax of a row is put together block by block (online softmax, arXiv 1805.02867), and the gradient is written by
hand: it computes the blocks again from the sum of each row (FlashAttention-2, arXiv 2307.08691). No array of T times S
is made in either direction. Everything is plain JAX. Short sequences take a few blocks of rows, each as long as what it
sees, which are written out: the scores of one head, not of all, are held. Long ones take rolled loops over square
blocks, so one small program is compiled whatever T is.

Letters: n a query head of a sequence (batch and heads in one axis), r row (query), s column (key), c channel.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import Array, lax
from jax.extend import random as generators
from jaxtyping import Float

from attn_bridge.masks import Mask

from .call import Call

SMALL_BLOCK = 128
"""Least rows and columns of a block: smaller ones compute less of what is hidden, but start more operations."""

UNROLLED = 2048
"""Longest sequences whose blocks are written out on a CPU: products as wide as what is seen share the cores."""

ROW_BLOCKS = 8
"""Blocks of rows that are written out: each compiles for itself."""

LARGE_BLOCK = 512
"""Rows and columns of a block in rolled loops."""


def unsupported(call: Call) -> str | None:
    """Return why it can't serve a call, None if it can: it makes no weights, and knows the masks of Threefry alone."""
    if call.return_weights:
        return "it never holds the attention weights (return_weights=True)"
    if 0 in call.query.shape or 0 in call.value.shape:
        return f"there is nothing in the query {call.query.shape} or the value {call.value.shape}"
    if any(_is_sharded(array) for array in (call.query, call.key, call.value)):
        return "its loops can't cut axes that are sharded explicitly; call it inside jax.shard_map"
    if call.dropout and call.rng is None:
        return f"dropout ({call.dropout}) needs rng"
    if call.dropout and not _is_threefry(call.rng):
        return "it draws dropout masks with partitionable Threefry only, and not under jax_enable_x64"
    return None


def unprofitable(call: Call) -> str | None:
    """Return why it isn't picked: few scores are computed as fast at once, and compile faster."""
    queries, keys = call.scores_shape[2:]
    if queries * keys < SMALL_BLOCK * SMALL_BLOCK:
        return f"fewer scores per head than one block of {SMALL_BLOCK} times {SMALL_BLOCK}"
    return None


def attend(call: Call) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    return attend_with_lse(call)[0]


def attend_with_lse(call: Call) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``, sinks included.

    The second is minus infinity where a row sees no key. With it, attention over parts of the keys can be put
    together. Both have gradients.
    """
    bias = call.bias if call.bias is None else _four_axes(call.bias)
    mask, arrays = (None, ()) if call.mask is None else call.mask.separate()
    seed = _key_words(call.rng) if call.dropout else None
    batch, heads, queries, keys = call.scores_shape
    shape = _Shape(batch, heads, call.key.shape[2], queries, keys)
    softcap = None if call.softcap is None else float(call.softcap)
    plan = _Plan(shape, mask, float(call.scale), softcap, float(call.dropout), **_blocks(shape, bias is not None))
    return _attention(plan, call.query, call.key, call.value, bias, call.sinks, tuple(map(_four_axes, arrays)), seed)


def _is_sharded(array: Array) -> bool:
    """Return whether the sharding is part of the type: then each operation must know what becomes of it."""
    return any(axis is not None for axis in jax.typeof(array).sharding.spec)


def _is_threefry(rng: Any) -> bool:
    """Return whether the dropout mask of a source of random numbers can be drawn block by block."""
    if isinstance(rng, nnx.Rngs):
        rng = rng.dropout
    if isinstance(rng, nnx.RngStream):
        rng = rng.key[...]
    if not isinstance(rng, Array) or jax.config.jax_enable_x64 or not jax.config.jax_threefry_partitionable:
        return False
    return jax.random.key_data(rng).shape == (2,) and str(jax.random.key_impl(rng)) in ("fry", "threefry2x32")


def _key_words(rng: Any) -> Array:
    if isinstance(rng, nnx.Rngs):
        rng = rng.dropout
    return jax.random.key_data(rng() if isinstance(rng, nnx.RngStream) else rng)


# ---- what is known before the numbers


@dataclasses.dataclass(frozen=True)
class _Shape:
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A call without its arrays, and the sizes of a block."""

    shape: _Shape
    mask: Mask | None
    scale: float
    softcap: float | None
    dropout: float
    together: int
    rows: int
    columns: int
    unrolled: bool

    @property
    def row_blocks(self) -> int:
        return -(-self.shape.queries // self.rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.shape.keys // self.columns)

    def whole(self) -> _Plan:
        """Return the plan with everything in one block."""
        shape = self.shape
        return dataclasses.replace(self, together=shape.batch * shape.heads, rows=shape.queries, columns=shape.keys)

    @functools.cached_property
    def visible(self) -> list[list[bool | None]]:
        """For each block of rows and each of columns whether all rows see all columns, none any, or it differs."""

        def answer(i: int, j: int) -> bool | None:
            rows = range(i * self.rows, min((i + 1) * self.rows, self.shape.queries))
            columns = range(j * self.columns, min((j + 1) * self.columns, self.shape.keys))
            seen = True if self.mask is None else self.mask.visibility(rows, columns)
            return None if seen and len(columns) < self.columns else seen

        return [[answer(i, j) for j in range(self.column_blocks)] for i in range(self.row_blocks)]

    @property
    def tables(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Blocks of columns, and where in that list those of each block of rows begin.

        Those that every row of the block sees come first, up to the second number, those to be masked up to the third.
        """
        listed: list[int] = []
        begins, middles, ends = [], [], []
        for answers in self.visible:
            begins.append(len(listed))
            listed += [j for j, answer in enumerate(answers) if answer]
            middles.append(len(listed))
            listed += [j for j, answer in enumerate(answers) if answer is None]
            ends.append(len(listed))
        return listed, begins, middles, ends

    def runs(self, i: int) -> list[tuple[bool, _Columns]]:
        """Return the neighbouring columns that a block of rows sees, and whether they are to be masked."""
        runs = []
        for is_seen, group in itertools.groupby(enumerate(self.visible[i]), lambda one: one[1] is not False):
            blocks = list(group)
            if is_seen:
                columns = _Columns(blocks[0][0] * self.columns, len(blocks) * self.columns)
                runs.append((any(answer is None for _, answer in blocks), columns))
        return runs


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Neighbouring columns: the first, and how many."""

    start: int | Array
    width: int


def _blocks(shape: _Shape, has_bias: bool) -> dict[str, Any]:
    """Return how many heads go together, the rows and columns of a block, and whether blocks are written out.

    More cores take larger blocks, as one matrix product is what they share, and one head at a time, as that keeps a
    block in the cache. An accelerator takes all heads at once, and so do several devices: what they share out, a loop
    over heads would gather.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_cpu = jax.default_backend() == "cpu"
    one_by_one = has_bias or (is_cpu and jax.device_count() == 1)
    unrolled = is_cpu and one_by_one and max(shape.queries, shape.keys) <= UNROLLED
    factor = max(1, math.isqrt(cores // 2)) if is_cpu else 1
    columns = (SMALL_BLOCK if unrolled else LARGE_BLOCK) * factor
    rows = max(columns, -(-shape.queries // ROW_BLOCKS)) if unrolled else columns
    return {
        "together": 1 if one_by_one else shape.batch * shape.heads,
        "rows": _even(shape.queries, rows),
        "columns": _even(shape.keys, columns),
        "unrolled": unrolled,
    }


def _even(size: int, block: int) -> int:
    """Return the size of the blocks that cut `size` into equal parts of at most `block`, in steps of 8."""
    if size <= block:
        return size
    part = -(-size // -(-size // block))
    return -(-part // 8) * 8


def _four_axes(array: Array) -> Array:
    """Return a mask or bias as ``(B, H, T, S)``, each the whole axis or 1; two axes are ``(B, S)`` in a mask only."""
    if array.dtype == bool and array.ndim == 2:
        return array[:, None, None, :]
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


# ---- the function and its gradient


@functools.partial(jax.jit, static_argnums=0)
def _attention(plan: _Plan, *operands: Any) -> tuple[Array, Array]:
    if jax.sharding.get_abstract_mesh().manual_axes:
        never = _false_of(operands)
        operands = jax.tree.map(lambda array: jnp.where(never, array, array), operands)
    context, top, total = _differentiable(plan, *operands)
    # Of the sum alone, so that its gradient is the one of the logarithm; the top is a shift that cancels.
    sums = jnp.where(total > 0.0, lax.stop_gradient(top) + jnp.log(jnp.where(total > 0.0, total, 1.0)), -jnp.inf)
    return context.astype(operands[0].dtype), sums


def _false_of(operands: Any) -> Array:
    """Return False, told apart along every axis of a `jax.shard_map` along which an operand is, as loops there ask."""
    firsts = (array.ravel()[:1].astype(bool) for array in jax.tree.leaves(operands))
    return functools.reduce(jnp.logical_or, (first ^ first for first in firsts)).any()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(plan: _Plan, *operands: Any) -> tuple[Array, Array, Array]:
    return _one_at_a_time(plan, _forward)(*operands)


def _one_at_a_time(plan: _Plan, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with its plan; where blocks are written out, `jax.vmap` of it goes on holding one head's."""
    planned = functools.partial(function, plan)
    return jax.custom_batching.sequential_vmap(planned) if plan.unrolled else planned


def _differentiable_forward(plan: _Plan, *operands: Any) -> tuple[tuple[Array, Array, Array], Any]:
    results = _differentiable(plan, *operands)
    return results, (operands, results)


def _differentiable_backward(plan: _Plan, kept: Any, cotangents: tuple[Array, Array, Array]) -> Any:
    operands, results = kept
    d_context, _, d_total = cotangents
    return (*_gradients(plan, operands, results, (d_context, d_total)), None, None)


_differentiable.defvjp(_differentiable_forward, _differentiable_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(plan: _Plan, operands: Any, results: Any, cotangents: Any) -> Any:
    """Return the gradients of query, key, value, bias and sinks; its own gradient takes T times S, as it is rare."""
    return _one_at_a_time(plan, _backward)(*operands, *results, *cotangents)


def _gradients_forward(plan: _Plan, operands: Any, results: Any, cotangents: Any) -> Any:
    return _gradients(plan, operands, results, cotangents), (operands, results, cotangents)


def _gradients_backward(plan: _Plan, kept: Any, seconds: Any) -> Any:
    (*inputs, arrays, seed), results, cotangents = kept

    def gradients(inputs: Any, cotangents: Any) -> Any:
        return jax.vjp(lambda *inputs: _in_one_block(plan, *inputs, arrays, seed), *inputs)[1](cotangents)

    _, pull = jax.vjp(gradients, tuple(inputs), cotangents)
    inputs_bar, cotangents_bar = pull(seconds)
    return (*inputs_bar, None, None), jax.tree.map(jnp.zeros_like, results), cotangents_bar


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _forward(
    plan: _Plan, query: Array, key: Array, value: Array, bias: Any, sinks: Any, arrays: Any, seed: Any
) -> tuple[Array, Array, Array]:
    """Return the context, unrounded, and per row the largest score and the sum of ``exp(scores - largest)``.

    The two are kept apart: in one logarithm the sum would be lost where all scores are around -1e9. A row that sees
    nothing has the sum 0.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    sides = _Sides(plan, query, key, value, bias, arrays, seed, dtype)

    def heads(first: Array) -> tuple[Array, Array, Array]:
        q, k, v = lax.optimization_barrier((sides.queries(first), sides.keys(first), sides.values(first)))

        def row_block(i: Any) -> tuple[Array, Array, Array]:
            q_block = sides.rows_of(q, i)

            def step(masked: bool, j: _Columns, kept: Any) -> Any:
                scores, _ = sides.scores(first, i, j, q_block, sides.columns_of(k, j), masked)
                top = scores.max(-1, keepdims=True)
                if kept is not None:
                    top = jnp.maximum(kept[1], top)
                safe_top = jnp.where(top == -jnp.inf, 0.0, top)
                weights = lax.optimization_barrier(jnp.exp(scores - safe_top))
                total = weights.sum(-1, keepdims=True)
                if seed is not None:
                    weights = weights * sides.kept(first, i, j)
                context = _times(weights, sides.columns_of(v, j))
                if kept is not None:
                    shrink = jnp.exp(kept[1] - safe_top)
                    context, total = kept[0] * shrink + context, kept[2] * shrink + total
                return context, top, total

            shape = (plan.together, plan.rows)
            nothing = sides.filled((*shape, v.shape[-1]), 0.0), sides.filled((*shape, 1), -jnp.inf)
            nothing = (*nothing, sides.filled((*shape, 1), 0.0))
            results = sides.over_columns(i, step, None if plan.unrolled else nothing)
            context, top, total = nothing if results is None else results
            sees = top != -jnp.inf
            if sinks is not None:
                sink = jnp.take(sinks.astype(dtype), sides.head_of(first), axis=0)[:, None, None]
                new_top = jnp.maximum(top, sink)
                safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                shrink = jnp.exp(top - safe_top)
                context, total, top = context * shrink, total * shrink + jnp.exp(sink - safe_top), new_top
            context = jnp.where(sees, context / total, 0.0)
            return context, jnp.where(sees, top, 0.0)[..., 0], jnp.where(sees, total, 0.0)[..., 0]

        contexts, tops, totals = sides.over_rows(row_block)
        tops, totals = (rearrange(one, "i n r -> n (i r)") for one in (tops, totals))
        return rearrange(contexts, "i n r c -> n (i r) c"), tops, totals

    context, top, total = lax.map(heads, sides.firsts)
    batch, queries = plan.shape.batch, plan.shape.queries
    context = rearrange(context, "m n t c -> (m n) t c")[:, :queries]
    top, total = (rearrange(one, "m n t -> (m n) t")[:, :queries] for one in (top, total))
    top, total = (rearrange(one, "(b h) t -> b h t", b=batch) for one in (top, total))
    return rearrange(context, "(b h) t c -> b t h c", b=batch), top, total


def _backward(
    plan: _Plan,
    query: Array,
    key: Array,
    value: Array,
    bias: Any,
    sinks: Any,
    arrays: Any,
    seed: Any,
    context: Array,
    top: Array,
    total: Array,
    d_context: Array,
    d_total: Array,
) -> tuple[Any, ...]:
    """Return the gradients of query, key, value, bias and sinks, each in the dtype of what it belongs to."""
    dtype = context.dtype
    sides = _Sides(plan, query, key, value, bias, arrays, seed, dtype)
    d_context = d_context.astype(dtype)
    # A row of softmax has the gradient weights * (d_weights - slope). What its weights are divided by is taken out of
    # the rows that they are multiplied with.
    share = jnp.where(total > 0.0, 1.0 / jnp.where(total > 0.0, total, 1.0), 0.0)
    slope = (rearrange((context * d_context).sum(-1), "b t h -> b h t") - d_total * total) * share
    if sinks is not None:
        d_sinks = -(jnp.exp(sinks.astype(dtype)[:, None] - top) * slope).sum((0, 2)).astype(sinks.dtype)
    d_context = d_context * rearrange(share, "b h t -> b t h 1")
    d_heads = _pad(rearrange(d_context, "b t h c -> (b h) t c"), 1, plan.rows)
    slope = _pad(rearrange(slope, "b h t -> (b h) t 1"), 1, plan.rows)
    # Rows that only fill a block up have no weights, however large the bias.
    tops = _pad(rearrange(top, "b h t -> (b h) t 1"), 1, plan.rows, jnp.inf)

    def heads(carry: Any, first: Array) -> Any:
        d_key, d_value, d_bias = carry
        q, k, v = lax.optimization_barrier((sides.queries(first), sides.keys(first), sides.values(first)))
        d_c, row_slope, row_tops = (sides.take(array, first) for array in (d_heads, slope, tops))

        def row_block(i: Any, carry: Any) -> Any:
            d_q, d_k, d_v, d_bias = carry
            q_block, d_c_block = sides.rows_of(q, i), sides.rows_of(d_c, i)
            slope_block, top_block = sides.rows_of(row_slope, i), sides.rows_of(row_tops, i)

            # Columns first: four of the five products then take both sides as they lie in memory, which is faster.
            def step(masked: bool, j: _Columns, kept: Any) -> Any:
                d_q_block, d_k, d_v, d_bias = kept
                k_block, v_block = sides.columns_of(k, j), sides.columns_of(v, j)
                scores, capped = sides.scores(first, i, j, q_block, k_block, masked, columns_first=True)
                weights = jnp.exp(scores - _turned(top_block))
                d_weights = _times_transposed(v_block, d_c_block)
                weights, d_weights = lax.optimization_barrier((weights, d_weights))
                dropped = weights
                if seed is not None:
                    keep = _turned(sides.kept(first, i, j))
                    dropped, d_weights = weights * keep, d_weights * keep
                d_scores = lax.optimization_barrier(weights * (d_weights - _turned(slope_block)))
                d_v = sides.add_columns(d_v, j, _times(dropped, d_c_block))
                if bias is not None:
                    d_bias = sides.add_bias(d_bias, first, i, j, _turned(d_scores))
                if capped is not None:
                    d_scores = d_scores * (1.0 - capped * capped)
                d_k = sides.add_columns(d_k, j, _times(d_scores, q_block))
                part = _transposed_times(d_scores, k_block)
                return part if d_q_block is None else d_q_block + part, d_k, d_v, d_bias

            none = None if plan.unrolled else sides.filled(q_block.shape, 0.0)
            d_q_block, d_k, d_v, d_bias = sides.over_columns(i, step, (none, d_k, d_v, d_bias))
            if d_q_block is None:
                return d_q, d_k, d_v, d_bias
            d_q = lax.dynamic_update_slice_in_dim(d_q, d_q_block * plan.scale, i * plan.rows, 1)
            return d_q, d_k, d_v, d_bias

        carry = (*(sides.filled(array.shape, 0.0) for array in (q, k, v)), d_bias)
        if plan.unrolled:
            for i in range(plan.row_blocks):
                carry = row_block(i, carry)
        else:
            carry = lax.fori_loop(0, plan.row_blocks, row_block, carry)
        d_q, d_k, d_v, d_bias = carry
        return (sides.add_keys(d_key, first, d_k), sides.add_keys(d_value, first, d_v), d_bias), d_q

    zeros = (sides.filled(sides.key.shape, 0.0), sides.filled(sides.value.shape, 0.0))
    d_bias = None if bias is None else sides.filled(sides.bias.shape, 0.0)
    (d_key, d_value, d_bias), d_query = lax.scan(heads, (*zeros, d_bias), sides.firsts)
    shape = plan.shape
    d_query = rearrange(d_query, "m n t c -> (m n) t c")[:, : shape.queries]
    if bias is not None:
        d_bias = d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return (
        rearrange(d_query, "(b h) t c -> b t h c", b=shape.batch).astype(query.dtype),
        rearrange(d_key[:, : shape.keys], "(b h) s c -> b s h c", b=shape.batch).astype(key.dtype),
        rearrange(d_value[:, : shape.keys], "(b h) s c -> b s h c", b=shape.batch).astype(value.dtype),
        d_bias,
        None if sinks is None else d_sinks,
    )


def _in_one_block(
    plan: _Plan, query: Array, key: Array, value: Array, bias: Any, sinks: Any, arrays: Any, seed: Any
) -> tuple[Array, Array]:
    """Return context and sums of `_forward` (the top cancels) by code that JAX can differentiate, also twice."""
    plan = plan.whole()
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    sides = _Sides(plan, query, key, value, bias, arrays, seed, dtype)
    zero = jnp.int32(0)
    every = _Columns(0, plan.columns)
    scores, _ = sides.scores(zero, 0, every, sides.queries(zero), sides.keys(zero), plan.mask is not None)
    sees = (scores != -jnp.inf).any(-1, keepdims=True)
    scores = jnp.where(sees, scores, 0.0)
    top = scores.max(-1, keepdims=True)
    sink = None if sinks is None else jnp.take(sinks.astype(dtype), sides.head_of(zero))[:, None, None]
    top = lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    if seed is not None:
        weights = weights * sides.kept(zero, 0, every)
    context = jnp.where(sees, _times(weights, sides.values(zero)) / total, 0.0)
    total = jnp.where(sees, total, 0.0)[..., 0]
    batch = plan.shape.batch
    return rearrange(context, "(b h) t c -> b t h c", b=batch), rearrange(total, "(b h) t -> b h t", b=batch)


def _product(one: Array, axis: int, two: Array, other: int) -> Array:
    """Return the matrix product of each head over an axis of either side; one head needs no batch, which is slower."""
    if one.shape[0] == 1:
        return lax.dot_general(one[0], two[0], (((axis - 1,), (other - 1,)), ((), ())))[None]
    return lax.dot_general(one, two, (((axis,), (other,)), ((0,), (0,))))


def _times(one: Array, two: Array) -> Array:
    return _product(one, 2, two, 1)


def _times_transposed(one: Array, two: Array) -> Array:
    return _product(one, 2, two, 2)


def _transposed_times(one: Array, two: Array) -> Array:
    return _product(one, 1, two, 1)


def _turned(block: Array) -> Array:
    """Return a block with columns first, or back."""
    return jnp.swapaxes(block, 1, 2)


def _pad(array: Array, axis: int, block: int, value: float = 0.0) -> Array:
    missing = -array.shape[axis] % block
    widths = [(0, missing if one == axis else 0) for one in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value) if missing else array


class _Sides:
    """The operands of a call with heads in front, filled up to whole blocks, and the parts of them a step needs.

    ``first`` is the first of the query heads that are worked on together, ``i`` the number of a block of rows, ``j``
    neighbouring columns.
    """

    def __init__(
        self, plan: _Plan, query: Array, key: Array, value: Array, bias: Any, arrays: Any, seed: Any, dtype: Any
    ):
        self.plan, self.dtype, self.seed = plan, dtype, seed
        self.query = _pad(rearrange(query, "b t h c -> (b h) t c"), 1, plan.rows)
        self.key = _pad(rearrange(key, "b s h c -> (b h) s c"), 1, plan.columns)
        self.value = _pad(rearrange(value, "b s h c -> (b h) s c"), 1, plan.columns)
        self.bias = None if bias is None else self._whole_blocks(bias)
        self.arrays = tuple(map(self._whole_blocks, arrays))
        shape = plan.shape
        self.group = shape.heads // shape.key_heads
        self.key_together = max(1, plan.together // self.group)
        self.never = _false_of(query) if jax.sharding.get_abstract_mesh().manual_axes else None
        self.firsts = jnp.arange(0, shape.batch * shape.heads, plan.together, dtype=jnp.int32)
        self.tables = [np.asarray(table, np.int32) for table in plan.tables]

    def _whole_blocks(self, array: Array) -> Array:
        rows = array if array.shape[2] == 1 else _pad(array, 2, self.plan.rows)
        return rows if rows.shape[3] == 1 else _pad(rows, 3, self.plan.columns)

    def filled(self, shape: tuple[int, ...], value: float) -> Array:
        """Return an array to begin a loop with."""
        array = jnp.full(shape, value, self.dtype)
        return array if self.never is None else jnp.where(self.never, array, array)

    # ---- heads

    def take(self, array: Array, first: Array) -> Array:
        """Return the query heads from `first` on that are worked on together."""
        return lax.dynamic_slice_in_dim(array, first, self.plan.together, 0)

    def queries(self, first: Array) -> Array:
        """Return the scaled queries ``(n, rows, c)``."""
        return self.take(self.query, first).astype(self.dtype) * self.plan.scale

    def keys(self, first: Array) -> Array:
        """Return the keys ``(n, columns, c)`` of the heads; those that share them read one copy."""
        return self._shared(self.key, first)

    def values(self, first: Array) -> Array:
        """Return the values ``(n, columns, c)`` of the heads."""
        return self._shared(self.value, first)

    def _shared(self, array: Array, first: Array) -> Array:
        array = lax.dynamic_slice_in_dim(array, first // self.group, self.key_together, 0).astype(self.dtype)
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

    def rows_of(self, array: Array, i: Any) -> Array:
        """Return a block of rows."""
        return lax.dynamic_slice_in_dim(array, i * self.plan.rows, self.plan.rows, 1)

    def columns_of(self, array: Array, j: _Columns) -> Array:
        """Return some columns."""
        return lax.dynamic_slice_in_dim(array, j.start, j.width, 1)

    def add_columns(self, total: Array, j: _Columns, part: Array) -> Array:
        """Add to some columns."""
        return lax.dynamic_update_slice_in_dim(total, self.columns_of(total, j) + part, j.start, 1)

    def over_rows(self, row_block: Callable[[Any], Any]) -> Any:
        """Return what a function makes of each block of rows, stacked."""
        if not self.plan.unrolled:
            return lax.map(row_block, jnp.arange(self.plan.row_blocks))
        return jax.tree.map(lambda *parts: jnp.stack(parts), *map(row_block, range(self.plan.row_blocks)))

    def over_columns(self, i: Any, step: Callable[[bool, _Columns, Any], Any], start: Any) -> Any:
        """Do a step for all columns that a block of rows sees, a block at a time in a rolled loop."""
        if self.plan.unrolled:
            kept = start
            for masked, columns in self.plan.runs(i):
                kept = step(masked, columns, kept)
            return kept
        listed, begins, middles, ends = (jnp.asarray(table) for table in self.tables)

        def at(masked: bool) -> Callable[[Array, Any], Any]:
            width = self.plan.columns
            return lambda at, kept: step(masked, _Columns(listed[at] * width, width), kept)

        if (self.tables[1] != self.tables[2]).any():
            start = lax.fori_loop(begins[i], middles[i], at(False), start)
        if (self.tables[2] != self.tables[3]).any():
            start = lax.fori_loop(middles[i], ends[i], at(True), start)
        return start

    def scores(
        self, first: Array, i: Any, j: _Columns, q: Array, k: Array, masked: bool, columns_first: bool = False
    ) -> tuple[Array, Array | None]:
        """Return the scores of a block, and what softcap made of them before its factor."""
        plan = self.plan
        lie = _turned if columns_first else lambda block: block
        scores, capped = _times_transposed(k, q) if columns_first else _times_transposed(q, k), None
        if plan.softcap is not None:
            capped = jnp.tanh(scores / plan.softcap)
            scores = plan.softcap * capped
        if self.bias is not None:
            scores = scores + lie(self._block_of(self.bias, first, i, j).astype(self.dtype))
        if masked:
            allowed = self._allowed(first, i, j)
            scores = jnp.where(lie(allowed if allowed.ndim == 3 else allowed[None]), scores, -jnp.inf)
        return scores, capped

    def _allowed(self, first: Array, i: Any, j: _Columns) -> Array:
        """Return which pairs of a block may attend; columns that only fill it up may not."""
        plan = self.plan
        rows = i * plan.rows + jnp.arange(plan.rows)[:, None]
        columns = j.start + jnp.arange(j.width)[None, :]
        inside = columns < plan.shape.keys
        if plan.mask is None:
            return inside
        blocks = iter([self._block_of(array, first, i, j) for array in self.arrays])
        return plan.mask.with_arrays(lambda _: next(blocks)).allowed(rows, columns) & inside

    def _block_of(self, array: Array, first: Array, i: Any, j: _Columns) -> Array:
        """Return the block ``(n, rows, columns)`` of an array ``(B, H, T, S)``, whose axes may be 1."""

        def one(sequence: Array, head: Array) -> Array:
            starts, sizes = self._place(array, sequence, head, i, j)
            return lax.dynamic_slice(array, starts, sizes)[0, 0]

        sequences, heads = self.sequence_of(first), self.head_of(first)
        if self.plan.together == 1:
            return one(sequences[0], heads[0])[None]
        return jax.vmap(one)(sequences, heads)

    def _place(self, array: Array, sequence: Array, head: Array, i: Any, j: _Columns) -> tuple[list[Array], list[int]]:
        at = (sequence, head, i * self.plan.rows, j.start)
        starts = [jnp.asarray(start if size > 1 else 0, jnp.int32) for start, size in zip(at, array.shape, strict=True)]
        block = (1, 1, self.plan.rows, j.width)
        return starts, [min(size, whole) for size, whole in zip(block, array.shape, strict=True)]

    def add_bias(self, total: Array, first: Array, i: Any, j: _Columns, part: Array) -> Array:
        """Add the gradients of a block to those of the bias, summed where the bias was broadcast."""
        starts, sizes = self._place(total, self.sequence_of(first)[0], self.head_of(first)[0], i, j)
        part = part[None]
        summed = part.sum([axis for axis in (2, 3) if sizes[axis] == 1 != part.shape[axis]], keepdims=True)
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, sizes) + summed, starts)

    def kept(self, first: Array, i: Any, j: _Columns) -> Array:
        """Return the factors of dropout for a block: those of ``jax.random.bernoulli`` over ``(B, H, T, S)``.

        Partitionable Threefry draws an element from its place alone, so a block needs nothing but its own places.
        """
        plan, shape = self.plan, self.plan.shape
        heads = (first + jnp.arange(plan.together)).astype(jnp.uint32)[:, None, None]
        rows = (i * plan.rows + jnp.arange(plan.rows)).astype(jnp.uint32)[:, None]
        columns = (j.start + jnp.arange(j.width)).astype(jnp.uint32)
        high, low = _multiply(heads * np.uint32(shape.queries) + rows, shape.keys)
        place = low + columns
        high = high + (place < low)
        high, place = (jnp.broadcast_to(one, (plan.together, plan.rows, j.width)) for one in (high, place))
        words = generators.threefry_2x32((self.seed[0], self.seed[1]), jnp.stack([high, place]).ravel())
        one, two = words.reshape(2, *place.shape)
        mantissa = ((one ^ two) >> np.uint32(9)) | np.uint32(0x3F800000)
        uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
        return jnp.where(uniform < np.float32(1.0 - plan.dropout), 1.0 / (1.0 - plan.dropout), 0.0).astype(self.dtype)


def _multiply(words: Array, factor: int) -> tuple[Array, Array]:
    """Return the high and the low words of the 64-bit products of uint32 words and a number below 2**32."""
    low_factor, high_factor = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    low_words, high_words = words & np.uint32(0xFFFF), words >> np.uint32(16)
    low = low_words * low_factor
    middle = high_words * low_factor + (low >> np.uint32(16))
    other = low_words * high_factor + (middle & np.uint32(0xFFFF))
    high = high_words * high_factor + (middle >> np.uint32(16)) + (other >> np.uint32(16))
    return high, words * np.uint32(factor)
