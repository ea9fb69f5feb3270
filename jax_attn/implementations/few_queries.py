"""Attention of few queries to many keys, as in decoding: the keys block by block, where they lie, no copy of them all.

Only blocks with a key that some query sees are read, which is found out from the mask as the program runs: a cache that
is nearly empty costs little. The softmax is put together block by block (arXiv 1805.02867). The gradient is that of the
reference. Letters: b batch, t query position, s key of a block, k key/value head, g query heads per key/value head,
c channel of a head.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jaxtyping import Float

from attn_bridge.masks import ArrayMask

from . import reference
from .block_operands import varying_with
from .call import KernelCall
from .derivatives.slopes import Operands, Slopes, tangents_of

MAX_QUERIES = 16
"""More queries share a block's keys well enough for `blocked`."""

BLOCK, BLOCK_ELSEWHERE = 512, 8192
"""Keys of a block on processors; and on a GPU or TPU, where the cost of a block is the launch of its kernels."""


MAX_SCORES = 1 << 28
"""Scores, of all heads, that a GPU computes at once rather than block by block: 1 GiB of them."""


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call, None if it can."""
    if call.return_weights:
        return "it never holds the attention weights (return_weights=True)"
    if call.dropout > 0:
        return "it has no dropout"
    if 0 in call.query.shape or 0 in call.value.shape:
        return f"there is nothing in the query {call.query.shape} or the value {call.value.shape}"
    return None


def unprofitable(call: KernelCall) -> str | None:
    """Return why it isn't picked: many queries, keys that make one block, or a GPU that needs no blocks."""
    queries, keys = call.scores_shape[2:]
    if queries > MAX_QUERIES:
        return f"more than {MAX_QUERIES} queries"
    if is_at_once(call):
        return "a GPU takes longer to start kernels for each block than for all scores at once"
    return f"no more than {BLOCK} keys" if keys <= BLOCK else None


def is_at_once(call: KernelCall) -> bool:
    """Return whether the reference is faster: 0.05 to 0.17 ms for 8,192 to 32,768 keys of bfloat16 on an H100.

    Blocks of 8,192 keys take 0.15 to 0.32 ms there, those of `blocked` 0.43 to 1.1 ms.
    """
    return (
        jax.default_backend() == "gpu"
        and not is_open(call)
        and call.scores_shape[2] <= MAX_QUERIES
        and math.prod(call.scores_shape) <= MAX_SCORES
    )


def is_open(call: KernelCall) -> bool:
    """Return whether `jax.export` leaves a size open, so that comparisons with it cannot be evaluated."""
    return not all(isinstance(size, int) for size in (*call.query.shape, *call.key.shape, *call.value.shape))


def attend(call: KernelCall) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    bias, allowed = (
        None if one is None else jnp.array(one, ndmin=4, copy=False) for one in (call.bias, call.allowed())
    )
    softcap = None if call.softcap is None else float(call.softcap)
    precision = jax.config.jax_default_matmul_precision
    return _attend(precision, float(call.scale), softcap, call.query, call.key, call.value, bias, call.sinks, allowed)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _attend(precision: str | None, scale: float, softcap: float | None, *operands: Array) -> Array:
    # The precision of the call, for derivatives, which JAX traces when the context of the call may have ended.
    query, key, value, bias, sinks, allowed = operands
    keys, heads, dtype = key.shape[1], key.shape[2], jnp.promote_types(query.dtype, jnp.float32)
    group, block = query.shape[2] // heads, min(_block(), keys)
    # The queries of heads that share keys are rows of one product, so that each key is read once.
    query_heads = rearrange(query.astype(dtype) * scale, "b t (k g) c -> b k (g t) c", k=heads)
    first, last = jnp.int32(0), jnp.int32(-(-keys // block))
    if allowed is not None and allowed.shape[3] > 1:
        # From the first to the last block with a key that some query of some sequence sees; none without such a key.
        seen = allowed.any((0, 1, 2))
        first = jnp.argmax(seen).astype(jnp.int32) // block
        last = jnp.where(seen.any(), (keys - 1 - jnp.argmax(seen[::-1]).astype(jnp.int32)) // block + 1, first)

    def of_block(array: Array, start: Array) -> Array:
        """Return the columns of an array ``(B, H, T, S)`` as ``(b, k, g, t, s)``."""
        if array.shape[3] > 1:
            array = lax.dynamic_slice_in_dim(array, start, block, 3)
        per_head = array.shape[1] != 1
        return rearrange(array, "b (k g) t s -> b k g t s", k=heads if per_head else 1)

    def step(j: Array, kept: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        context, top, total = kept
        start = jnp.minimum(j * block, keys - block)
        k, v = (_keys(array, start, block).astype(dtype) for array in (key, value))
        scores = lax.dot_general(query_heads, k, (((3,), (3,)), ((0, 1), (0, 2))))
        scores = rearrange(scores, "b k (g t) s -> b k g t s", g=group)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        if bias is not None:
            scores = scores + of_block(bias, start).astype(dtype)
        # The last block begins earlier than it should if the keys are no whole number of blocks.
        visible = start + jnp.arange(block) >= j * block
        if allowed is not None:
            visible = visible & of_block(allowed, start)
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - safe_top)
        shrink = jnp.exp(top - safe_top)
        flat = rearrange(weights, "b k g t s -> b k (g t) s")
        part = lax.dot_general(flat, v, (((3,), (1,)), ((0, 1), (0, 2))))
        part = rearrange(part, "b k (g t) c -> b k g t c", g=group)
        return context * shrink + part, new_top, total * shrink + weights.sum(-1, keepdims=True)

    shape = (query.shape[0], heads, group, query.shape[1])
    context, total = jnp.zeros((*shape, value.shape[3]), dtype), jnp.zeros((*shape, 1), dtype)
    carry = varying_with(operands, (context, jnp.full((*shape, 1), -jnp.inf, dtype), total))
    context, top, total = lax.fori_loop(first, last, step, carry)
    sees = total != 0.0  # also where all scores are NaN, which XLA's maximum may pass over
    if sinks is not None:
        sink = rearrange(sinks.astype(dtype), "(k g) -> k g 1 1", k=heads)
        new_top = jnp.maximum(jnp.where(sees, top, sink), sink)
        shrink = jnp.where(sees, jnp.exp(top - new_top), 0.0)
        context, total = context * shrink, total * shrink + jnp.exp(sink - new_top)
    context = jnp.where(sees, context / jnp.where(sees, total, 1.0), 0.0)
    return rearrange(context, "b k g t c -> b t (k g) c").astype(query.dtype)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _differentiate(
    precision: str | None, scale: float, softcap: float | None, operands: Operands, tangents: Operands
) -> tuple[Array, Array]:
    with jax.default_matmul_precision(precision):
        result = _attend(precision, scale, softcap, *operands)
    slopes = Slopes(_plain, _backward, (scale, softcap), precision)
    return result, tangents_of(slopes, operands, (result,), tangents)[0]


def _plain(scale: float, softcap: float | None, *operands: object) -> tuple[Array]:
    *inputs, allowed = operands
    query, key, value, bias, sinks = inputs
    mask = None if allowed is None else ArrayMask(allowed)
    return (reference.attend(KernelCall(query, key, value, mask, bias, scale, softcap, sinks, 0.0, None, False)),)


def _backward(
    scale: float, softcap: float | None, operands: Operands, results: Operands, cotangents: Operands
) -> Operands:
    *inputs, allowed = operands
    return jax.vjp(lambda *inputs: _plain(scale, softcap, *inputs, allowed), *inputs)[1](cotangents)


def _block() -> int:
    return BLOCK if jax.default_backend() == "cpu" else BLOCK_ELSEWHERE


def _keys(array: Array, start: Array, size: int) -> Array:
    """Return keys from `start` on; as integers, as XLA's CPU would widen all bfloat16 to take a part of them."""
    if array.dtype.itemsize != 2 or jax.default_backend() != "cpu":
        return lax.dynamic_slice_in_dim(array, start, size, 1)
    # Else the loop would be given all keys as integers, which is a copy.
    array, start = lax.optimization_barrier((array, start))
    part = lax.dynamic_slice_in_dim(lax.bitcast_convert_type(array, jnp.uint16), start, size, 1)
    return lax.bitcast_convert_type(part, array.dtype)
