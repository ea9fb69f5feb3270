"""Attention a block of scores at a time, in memory that grows with T, and only the blocks with visible keys.

The softmax of a row is combined block by block (online softmax, arXiv 1805.02867), and the gradient is written by hand:
it recomputes the blocks from the sum of each row (FlashAttention-2, arXiv 2307.08691). Everything is plain JAX. Long
sequences take rolled loops over square blocks: no array of T times S is made in either direction, and one small program
is compiled whatever T is. Short ones on a CPU have their blocks written out (`block_plan`), and the scores of one head
are held, not those of all.

Letters: n a query head of a sequence (batch and heads in one axis), r row (query), s column (key), c channel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from . import few_queries
from .block_operands import Operands, pad, sum_over_keys, swap_last_axes, times, times_transposed, transposed_times
from .block_plan import SMALL_BLOCK, BlockPlan, Columns, Shape, block_sizes
from .call import KernelCall
from .derivatives.differentiation import Passes, attention, gradient_of_sinks

Results = TypeVar("Results")

Sums = tuple[Array, Array, Array]
"""Context, largest scores and sums of ``exp(scores - largest)`` of rows."""

Gradients = tuple[Array | None, Array, Array, Array | None]
"""Of the queries of a block of rows, of keys, values and bias; None for those that are not asked for, or not begun."""

Carried = tuple[Array, Array, Array | None]
"""Gradients of all keys, values and the bias so far."""


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call, None if it can: it makes no weights, and knows the masks of Threefry alone."""
    if call.return_weights:
        return "it never holds the attention weights (return_weights=True)"
    if 0 in call.query.shape or 0 in call.value.shape:
        return f"there is nothing in the query {call.query.shape} or the value {call.value.shape}"
    if any(is_sharded(array) for array in (call.query, call.key, call.value)):
        return "its loops can't cut axes that are sharded explicitly; call it inside jax.shard_map"
    return refuses_dropout(call)


def refuses_dropout(call: KernelCall) -> str | None:
    """Return why the dropout mask of a call can't be drawn block by block, None if it can or there is none."""
    if call.dropout and call.rng is None:
        return f"dropout ({call.dropout}) needs rng"
    if call.dropout and not _is_threefry(call.rng):
        return "it draws dropout masks with partitionable Threefry only, and not under jax_enable_x64"
    return None


def unprofitable(call: KernelCall) -> str | None:
    """Return why it isn't picked: few scores are computed as fast at once, and compile faster."""
    queries, keys = call.scores_shape[2:]
    if queries * keys < SMALL_BLOCK * SMALL_BLOCK:
        return f"fewer scores per head than one block of {SMALL_BLOCK} times {SMALL_BLOCK}"
    if few_queries.is_at_once(call):
        return f"no more than {few_queries.MAX_QUERIES} queries, which a GPU takes at once"
    return None


def attend(call: KernelCall) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    return attend_with_lse(call)[0]


def attend_with_lse(call: KernelCall) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``, sinks included.

    The second is minus infinity where a row sees no key. With it, attention over parts of the keys can be put
    together. Both have gradients.
    """
    bias = call.bias if call.bias is None else jnp.array(call.bias, ndmin=4, copy=False)
    mask, arrays = (None, ()) if call.mask is None else call.mask.separate()
    seed = key_words(call.rng) if call.dropout else None
    batch, heads, queries, keys = call.scores_shape
    shape = Shape(batch, heads, call.key.shape[2], queries, keys)
    softcap = None if call.softcap is None else float(call.softcap)
    plan = BlockPlan(
        shape, mask, float(call.scale), softcap, float(call.dropout), **block_sizes(shape, bias is not None)
    )
    masks = tuple(map(_of_mask, arrays))
    return attention(PASSES, plan, call.query, call.key, call.value, bias, call.sinks, masks, seed)


def is_sharded(array: Array) -> bool:
    """Return whether the sharding is part of the type, so that each operation must declare its result's sharding."""
    return any(axis is not None for axis in jax.typeof(array).sharding.spec)


def _is_threefry(rng: object) -> bool:
    """Return whether the dropout mask of a source of random numbers can be drawn block by block."""
    if isinstance(rng, nnx.Rngs):
        rng = rng.dropout
    if isinstance(rng, nnx.RngStream):
        rng = rng.key[...]
    if not isinstance(rng, Array) or jax.config.jax_enable_x64 or not jax.config.jax_threefry_partitionable:
        return False
    return jax.random.key_data(rng).shape == (2,) and str(jax.random.key_impl(rng)) in ("fry", "threefry2x32")


def key_words(rng: object) -> Array:
    """Return the two words of a source of random numbers, which counts that as a use."""
    if isinstance(rng, nnx.Rngs):
        rng = rng.dropout
    return jax.random.key_data(rng() if isinstance(rng, nnx.RngStream) else rng)


def _of_mask(array: Array) -> Array:
    """Return the array of a mask as ``(B, H, T, S)``, each the whole axis or 1; two axes are ``(B, S)``."""
    if array.dtype == bool and array.ndim == 2:
        return array[:, None, None, :]
    return jnp.array(array, ndmin=4, copy=False)


def _one_at_a_time(function: Callable[..., Results]) -> Callable[..., Results]:
    """Return a function of a plan and arrays; with blocks written out, `jax.vmap` of it still holds one head's."""

    def run(plan: BlockPlan, *arrays: object) -> Results:
        planned = functools.partial(function, plan)
        return (jax.custom_batching.sequential_vmap(planned) if plan.unrolled else planned)(*arrays)

    return run


def forward(
    plan: BlockPlan,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    sinks: Array | None,
    arrays: tuple[Array, ...],
    seed: Array | None,
) -> tuple[Array, Array, Array]:
    """Return the context, unrounded, and per row the largest score and the sum of ``exp(scores - largest)``.

    The two are kept apart: in one logarithm the sum would be lost where all scores are around -1e9. A row that sees
    nothing has the sum 0.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    sides = Operands(plan, query, key, value, bias, arrays, seed, dtype, narrow=True)

    def heads(first: Array) -> tuple[Array, Array, Array]:
        q, k, v = lax.optimization_barrier((sides.queries(first), sides.keys(first), sides.values(first)))

        def row_block(i: Array | int) -> tuple[Array, Array, Array]:
            q_block = sides.rows_of(q, i)

            def step(masked: bool, j: Columns, kept: Sums | None) -> Sums | None:
                scores, _ = sides.scores(first, i, j, q_block, sides.columns_of(k, j), masked)
                top = scores.max(-1, keepdims=True)
                if kept is not None:
                    top = jnp.maximum(kept[1], top)
                # -inf - -inf is NaN: a row that has seen no key so far is shifted by 0, which leaves its weights 0.
                safe_top = jnp.where(top == -jnp.inf, 0.0, top)
                weights = lax.optimization_barrier(jnp.exp(scores - safe_top))
                total = weights.sum(-1, keepdims=True)
                if seed is not None:
                    weights = weights * sides.kept(first, i, j)
                context = times(weights, sides.columns_of(v, j))
                if kept is not None:
                    # What was summed so far is relative to an earlier largest score (arXiv 1805.02867).
                    shrink = jnp.exp(kept[1] - safe_top)
                    context, total = kept[0] * shrink + context, kept[2] * shrink + total
                return context, top, total

            shape = (plan.together, plan.rows)
            nothing = (
                sides.filled((*shape, v.shape[-1]), 0.0),
                sides.filled((*shape, 1), -jnp.inf),
                sides.filled((*shape, 1), 0.0),
            )
            results = sides.over_columns(i, step, None if plan.unrolled else nothing)
            context, top, total = nothing if results is None else results
            sees = total != 0.0  # also where all scores are NaN, which XLA's maximum may pass over
            if sinks is not None:
                # A sink is a term of the divisor without a value, and may be larger than all scores of the row.
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


def backward(
    plan: BlockPlan,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    sinks: Array | None,
    arrays: tuple[Array, ...],
    seed: Array | None,
    context: Array,
    top: Array,
    total: Array,
    d_context: Array,
    d_total: Array,
) -> tuple[Array | None, ...]:
    """Return the gradients of query, key, value, bias and sinks, each in the dtype of its operand."""
    dtype = context.dtype
    sides = Operands(plan, query, key, value, bias, arrays, seed, dtype)
    d_context = d_context.astype(dtype)
    # A row of softmax has the gradient weights * (d_weights - slope). What its weights are divided by is taken out of
    # the rows that they are multiplied with.
    share = jnp.where(total != 0.0, 1.0 / jnp.where(total != 0.0, total, 1.0), 0.0)
    of_sums = -jnp.where(total != 0.0, d_total, 0.0)
    slope = rearrange((context * d_context).sum(-1), "b t h -> b h t") * share + of_sums
    if sinks is not None:
        d_sinks = gradient_of_sinks(sinks, top, total, slope)
    d_context = d_context * rearrange(share, "b h t -> b t h 1")
    d_heads = pad(rearrange(d_context, "b t h c -> (b h) t c"), 1, plan.rows)
    slope, of_sums, totals = (
        pad(rearrange(one, "b h t -> (b h) t 1"), 1, plan.rows) for one in (slope, of_sums, total)
    )
    # Rows that only fill a block up have no weights, however large the bias.
    tops = pad(rearrange(top, "b h t -> (b h) t 1"), 1, plan.rows, jnp.inf)

    def heads(carry: Carried, first: Array) -> tuple[Carried, Array]:
        d_key, d_value, d_bias = carry
        q, k, v = lax.optimization_barrier((sides.queries(first), sides.keys(first), sides.values(first)))
        d_c = sides.take(d_heads, first)
        per_row = [sides.take(array, first) for array in (tops, slope, of_sums, totals)]
        sink = None if sinks is None else jnp.take(sinks.astype(dtype), sides.head_of(first))[:, None, None]

        def row_block(i: Array | int, carry: Gradients) -> Gradients:
            d_q, d_k, d_v, d_bias = carry
            q_block, d_c_block = sides.rows_of(q, i), sides.rows_of(d_c, i)
            top_block, slope_block, of_sums_block, total_block = (
                swap_last_axes(sides.rows_of(one, i)) for one in per_row
            )

            # Columns first: four of the five products then take both sides as they lie in memory, which is faster.
            def weigh(masked: bool, j: Columns) -> tuple[Array, Array, Array, Array | None]:
                """Return the weights, those after dropout, the gradient of the former, and the capped scores."""
                k_block, v_block = sides.columns_of(k, j), sides.columns_of(v, j)
                scores, capped = sides.scores(first, i, j, q_block, k_block, masked, columns_first=True)
                weights = jnp.exp(scores - top_block)
                d_weights = times_transposed(v_block, d_c_block)
                weights, d_weights = lax.optimization_barrier((weights, d_weights))
                if seed is None:
                    return weights, weights, d_weights, capped
                keep = swap_last_axes(sides.kept(first, i, j))
                return weights, weights * keep, d_weights * keep, capped

            def add(
                j: Columns, seen: tuple[Array, Array, Array, Array | None], slope: Array, kept: Gradients
            ) -> Gradients:
                """Add a block's contribution to the gradients."""
                d_q_block, d_k, d_v, d_bias = kept
                weights, dropped, d_weights, capped = seen
                d_scores = lax.optimization_barrier(weights * (d_weights - slope))
                d_v = sides.add_columns(d_v, j, times(dropped, d_c_block))
                # The bias is added behind the cap, so that its gradient is taken before that of the cap, 1 - tanh**2.
                if d_bias is not None:
                    d_bias = sides.add_bias(d_bias, first, i, j, swap_last_axes(d_scores))
                if capped is not None:
                    d_scores = d_scores * (1.0 - capped * capped)
                # Of scaled queries, so that the gradient of keys needs no factor; that of queries gets it below.
                d_k = sides.add_columns(d_k, j, times(d_scores, q_block))
                part = transposed_times(d_scores, sides.columns_of(k, j))
                return part if d_q_block is None else d_q_block + part, d_k, d_v, d_bias

            kept = (None if plan.unrolled else sides.filled(q_block.shape, 0.0), d_k, d_v, d_bias)
            if plan.unrolled:
                # With all that a row sees at hand, its weights are held to their own sum, and its slope to that of the
                # products: the rounding of scores, which the forward pass may do in another order, and of the context
                # would stay otherwise, times all that the keys have in common.
                seen = [(j, weigh(masked, j)) for masked, j in plan.runs(i)]
                sums = jnp.zeros_like(top_block) if sink is None else jnp.exp(sink - top_block)
                products = jnp.zeros_like(top_block)
                for _, (weights, _, d_weights, _) in seen:
                    sums, products = sums + sum_over_keys(weights), products + sum_over_keys(weights * d_weights)
                share_block = jnp.where(sums != 0.0, 1.0 / jnp.where(sums != 0.0, sums, 1.0), 0.0)
                slope_block, factor = of_sums_block + products * share_block, total_block * share_block
                for j, (weights, dropped, *others) in seen:
                    kept = add(j, (weights * factor, dropped * factor, *others), slope_block, kept)
            else:
                kept = sides.over_columns(i, lambda masked, j, kept: add(j, weigh(masked, j), slope_block, kept), kept)
            d_q_block, d_k, d_v, d_bias = kept
            if d_q_block is None:
                return d_q, d_k, d_v, d_bias
            d_q = lax.dynamic_update_slice_in_dim(d_q, d_q_block * plan.scale, i * plan.rows, 1)
            return d_q, d_k, d_v, d_bias

        gradients: Gradients = (*(sides.filled(array.shape, 0.0) for array in (q, k, v)), d_bias)
        if plan.unrolled:
            for i in range(plan.row_blocks):
                gradients = row_block(i, gradients)
        else:
            gradients = lax.fori_loop(0, plan.row_blocks, row_block, gradients)
        d_q, d_k, d_v, d_bias = gradients
        return (sides.add_keys(d_key, first, d_k), sides.add_keys(d_value, first, d_v), d_bias), d_q

    zeros = (sides.filled(sides.key.shape, 0.0), sides.filled(sides.value.shape, 0.0))
    d_bias = sides.filled(sides.bias.shape, 0.0) if sides.bias is not None and plan.differentiates_bias else None
    (d_key, d_value, d_bias), d_query = lax.scan(heads, (*zeros, d_bias), sides.firsts)
    shape = plan.shape
    d_query = rearrange(d_query, "m n t c -> (m n) t c")[:, : shape.queries]
    if bias is not None and d_bias is not None:
        d_bias = d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return (
        rearrange(d_query, "(b h) t c -> b t h c", b=shape.batch).astype(query.dtype),
        rearrange(d_key[:, : shape.keys], "(b h) s c -> b s h c", b=shape.batch).astype(key.dtype),
        rearrange(d_value[:, : shape.keys], "(b h) s c -> b s h c", b=shape.batch).astype(value.dtype),
        d_bias,
        None if sinks is None else d_sinks,
    )


def at_once(
    plan: BlockPlan,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    sinks: Array | None,
    arrays: tuple[Array, ...],
    seed: Array | None,
) -> tuple[Array, Array]:
    """Return context and sums of `forward` (the top cancels) by code that JAX can differentiate, also twice."""
    plan = plan.whole()
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    sides = Operands(plan, query, key, value, bias, arrays, seed, dtype)
    zero = jnp.int32(0)
    every = Columns(0, plan.columns)
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
    context = jnp.where(sees, times(weights, sides.values(zero)) / total, 0.0)
    total = jnp.where(sees, total, 0.0)[..., 0]
    batch = plan.shape.batch
    return rearrange(context, "(b h) t c -> b t h c", b=batch), rearrange(total, "(b h) t -> b h t", b=batch)


PASSES = Passes(_one_at_a_time(forward), _one_at_a_time(backward), at_once)
"""For `differentiation.attention`."""
