"""Attention that keeps a matrix per head instead of keys: token by token, or the same numbers chunk by chunk.

The twin is `torch_attn.recurrent.recurrence`. Letters: b batch, t position (s an earlier one), n chunk, h head, g value
heads per query head, c channel of query and key, v channel of value.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from einops import einsum, rearrange, repeat
from jax import Array
from jaxtyping import Bool, Float

from attn_bridge.masks import Mask, as_mask
from attn_bridge.recurrence import CHUNK_SIZE, check_recurrence, check_state, check_token_mask, choose_form
from attn_bridge.sharding.heads import check_width

from .. import functional
from . import chunks

if TYPE_CHECKING:
    from ..parallel.sharding import Sharding

BLOCK = 8
"""Rows of the blocks that a triangular system is solved by."""


def gated_delta_rule(
    query: Float[Array, "B T K D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T H Dv"],
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H D"],
    beta: Float[Array, "B T H"],
    *,
    state: Float[Array, "B H D Dv"] | None = None,
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
    sharding: Sharding | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H D Dv"]]:
    """Decay the state, correct its value for a key, then read it (arXiv 2412.06464).

    ``state = exp(log_decay) * state``; ``state += key (beta * (value - key state))^T``; ``context = query state``. All
    of it runs in float32, in float64 for float64 values.

    Args:
        query: ``(B, T, K, D)``, scaled; K divides H, and value head ``i`` reads query and key head ``i // (H // K)``.
        key: ``(B, T, K, D)``, of length 1 at most, or the state may grow.
        value: ``(B, T, H, Dv)``.
        log_decay: ``(B, T, H)``, 0 or less: its exponential is the share of the state that remains; or
            ``(B, T, H, D)``, for each channel of the key (Kimi Delta Attention, arXiv 2510.26692): take small chunks
            then, such as `CHANNEL_CHUNK_SIZE`, since a chunk holds a decay per channel and pair of tokens.
        beta: ``(B, T, H)``, from 0 (writes nothing) over 1 (replaces the former value) to 2 (reflects it).
        state: ``(B, H, D, Dv)`` that earlier tokens left; None is zeros.
        form: ``"chunked"`` or ``"recurrent"``; None takes chunks unless there is a single token.
        chunk_size: tokens of a chunk.
        sharding: devices that share the call, as `parallel.parallelize` gives it to modules.

    Returns:
        The context ``(B, T, H, Dv)`` and the new state, in the dtype of the computation.

    Raises:
        ValueError: shapes that do not fit, or an unknown form.

    Source: Yang et al., arXiv 2406.06484, for the triangular system that makes a chunk one step.
    """
    arrays = (query, key, value, log_decay, beta)
    shapes = [tuple(array.shape) for array in arrays]
    check_recurrence(shapes, None if state is None else tuple(state.shape), by_channel=True)
    dtype = functional.wide_dtype(value)
    query, key, value, log_decay, beta = (one.astype(dtype) for one in arrays)
    groups = value.shape[2] // key.shape[2]
    if groups > 1:
        query = repeat(query, "b t h c -> b t (h g) c", g=groups)
        key = repeat(key, "b t h c -> b t (h g) c", g=groups)
    if state is None:
        state = chunks.empty_state(value, key.shape[3])
    chunked = choose_form(form, value.shape[1], chunk_size) == "chunked"
    run = _delta_chunks if chunked else _delta_tokens
    sequences = (query, key, value, log_decay, beta)
    if sharding is not None:
        return sharding.recur(run, sequences, state.astype(dtype), chunk_size)
    return run(*sequences, state.astype(dtype), chunk_size)


def linear_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T H D"],
    value: Float[Array, "B T H Dv"],
    *,
    state: Float[Array, "B H D Dv+1"] | None = None,
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
    sharding: Sharding | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H D Dv+1"]]:
    """Causal attention whose weights are products of features, divided by their sum (arXiv 2006.16236).

    ``state += key (value, 1)^T``; ``context = query state``, divided by its last channel, which holds the sum of the
    weights. All of it runs in float32, in float64 for float64 values. A query that has met no key gets zeros.

    Args:
        query: ``(B, T, H, D)`` features, 0 or more.
        key: ``(B, T, H, D)`` features, 0 or more; zeros hide a token.
        value: ``(B, T, H, Dv)``.
        state: ``(B, H, D, Dv + 1)`` that earlier tokens left; None is zeros.
        form: ``"chunked"`` or ``"recurrent"``; None takes chunks unless there is a single token.
        chunk_size: tokens of a chunk.
        sharding: devices that share the call, as `parallel.parallelize` gives it to modules.

    Returns:
        The context ``(B, T, H, Dv)`` and the new state, in the dtype of the computation.

    Raises:
        ValueError: a state that does not fit, or an unknown form.
    """
    dtype = functional.wide_dtype(value)
    query, key, value = (one.astype(dtype) for one in (query, key, value))
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)
    shape = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    check_state(None if state is None else tuple(state.shape), shape)
    state = chunks.empty_state(value, key.shape[3]) if state is None else state.astype(dtype)
    chunked = choose_form(form, value.shape[1], chunk_size) == "chunked"
    run = _linear_chunks if chunked else _linear_tokens
    if sharding is not None:
        context, state = sharding.recur(run, (query, key, value), state, chunk_size)
    else:
        context, state = run(query, key, value, state, chunk_size)
    # The channel of ones has gone through the same sums as the values: it is the sum of the weights.
    total = context[..., -1:]
    return _share(context[..., :-1], _divisor(total)), state


def unit_length(x: Float[Array, "... c"], eps: float = 1e-6) -> Float[Array, "... c"]:
    """Divide vectors by ``sqrt(sum of squares + eps)``, in float32, in float64 for float64 input."""
    wide = functional.widen(x)
    return wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + eps)


def log_decay(
    alpha: Float[Array, "B T H"], dt_bias: Float[Array, "H"], a_log: Float[Array, "H"]
) -> Float[Array, "B T H"]:
    """Return ``-exp(a_log) * softplus(alpha + dt_bias)``, in float32, in float64 for float64 input."""
    check_width("W_alpha", alpha.shape[-1], dt_bias.shape[-1])
    check_width("A_log", a_log.shape[0], dt_bias.shape[0])
    dtype = functional.wide_dtype(alpha)
    total = alpha.astype(dtype) + dt_bias.astype(dtype)
    return -jnp.exp(a_log.astype(dtype)) * jnp.logaddexp(total, jnp.zeros_like(total))


def positive_features(x: Float[Array, "... c"]) -> Float[Array, "... c"]:
    """Return ``elu(x) + 1``, above 0, in float32, in float64 for float64 input."""
    # Where x is negative that is its exponential, and 1 would swallow it if it were added and subtracted.
    wide = functional.widen(x)
    return jnp.where(wide > 0, wide + 1.0, jnp.exp(jnp.where(wide > 0, 0.0, wide)))


def relative_features(x: Float[Array, "... c"]) -> Float[Array, "... c"]:
    """Return `positive_features` of queries, scaled so that each query's largest is 1; the later division cancels that.

    So a query far below zero in all channels has non-zero features, and a gradient that does not overflow.
    """
    wide = functional.widen(x)
    top = jax.lax.stop_gradient(wide).max(-1, keepdims=True)
    low = jnp.exp(jnp.where(wide > 0, 0.0, wide) - jnp.minimum(top, 0.0))
    return jnp.where(wide > 0, wide + 1.0, low) / (jnp.maximum(top, 0.0) + 1.0)


def _divisor(total: Array) -> Array:
    """Return the divisor: `total`, or 1 for a query that has met no key, to avoid 0 / 0.

    A sum below the smallest normal number counts as no key: XLA flushes it to 0, and 1 over it overflows.
    """
    return jnp.where(total < jnp.finfo(total.dtype).tiny, 1.0, total)


@jax.custom_jvp
def _share(part: Array, total: Array) -> Array:
    """Divide; JAX's own derivative has ``total**-2``, which overflows where `total` is below 1e-19."""
    return part / total


@_share.defjvp
def _share_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    share = _share(*primals)
    return share, (tangents[0] - share * tangents[1]) / primals[1]


def linear_weights(query: Float[Array, "B T H D"], key: Float[Array, "B S H D"], mask: Mask) -> Float[Array, "B H T S"]:
    """Return the products of features, divided by their sum over the keys that `mask` shows; zeros where there is none.

    Raises:
        TypeError: a mask that is not bool.
        ValueError: a mask that does not broadcast.
    """
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    allowed = functional.visible_keys(mask, shape, query)
    products = jnp.where(allowed, einsum(query, key, "b t h c, b s h c -> b h t s"), 0.0)
    total = products.sum(-1, keepdims=True)
    return _share(products, _divisor(total))


def average(weights: Float[Array, "B H T S"], value: Float[Array, "B S H Dv"]) -> Float[Array, "B T H Dv"]:
    """Return the averages of the values, in the dtype of the weights."""
    return einsum(weights, value.astype(weights.dtype), "b h t s, b s h v -> b t h v")


def hides_tokens_only(attention_mask: object) -> bool:
    """Return whether a mask, None included, is an array that shows all queries and heads the same tokens."""
    if attention_mask is None:
        return True
    shape = _shape_of(attention_mask)
    return shape is not None and (len(shape) == 2 or (len(shape) == 4 and shape[1:3] == (1, 1)))


def mask_shape(attention_mask: object) -> tuple[int, int] | None:
    """Return ``(B, S)`` of a mask that is an array which shows all queries and heads the same tokens; else None."""
    shape = None if attention_mask is None else _shape_of(attention_mask)
    return (shape[0], shape[-1]) if shape is not None and hides_tokens_only(attention_mask) else None


def _shape_of(attention_mask: object) -> tuple[int, ...] | None:
    """Return the shape of a mask that is an array or nested lists; None of a description."""
    array = _array_of(attention_mask)
    return None if array is None else functional.shape_of(array)


def _array_of(attention_mask: object) -> Any:
    """Return a mask unchanged if it is an array or nested lists; None if it is an `attn_bridge.masks` description."""
    is_description = as_mask(attention_mask) is attention_mask  # it refuses what is neither
    return None if is_description else attention_mask


def visible_tokens(
    attention_mask: Mask | Bool[Array, "..."] | None, x: Float[Array, "B T D"], cache: Any = None
) -> Bool[Array, "B T"] | None:
    """Return which tokens of ``x`` count, ``(B, T)``, from a mask over these and those that `cache` has seen.

    Raises:
        TypeError: a mask that is not bool.
        ValueError: a mask that is neither ``(B, S)`` nor ``(B, 1, 1, S)``.
    """
    if attention_mask is None:
        return None
    longest = x.shape[1] if cache is None else cache.capacity
    array = _array_of(attention_mask)
    if array is None:
        mask = functional.as_placed(attention_mask).placed(x.shape[1], longest)
        array = mask.allowed(jnp.arange(x.shape[1])[:, None], jnp.arange(longest)[None, :])
        array = array[(None,) * (4 - array.ndim)]
    array = functional.as_visible(jnp.asarray(array))
    shape = tuple(array.shape)
    check_token_mask(shape, functional.dtype_name(array), x.shape[0], x.shape[1], longest)
    bare = array.reshape(shape[0], shape[-1])
    if len(shape) == 2:
        functional.look_at_mask(bare, (x.shape[0], 1, x.shape[1], shape[1]))
    start = 0 if cache is None else cache.length
    now = jax.lax.dynamic_slice_in_dim(bare, start, x.shape[1], axis=1)
    return jnp.broadcast_to(now, x.shape[:2])


def without(array: Float[Array, "B T ..."], visible: Bool[Array, "B T"] | None) -> Float[Array, "B T ..."]:
    """Return an array with zeros at the tokens that do not count."""
    if visible is None:
        return array
    return jnp.where(visible.reshape(*visible.shape, *(1,) * (array.ndim - 2)), array, 0.0)


def _delta_tokens(
    query: Array, key: Array, value: Array, log_decay: Array, beta: Array, state: Array, chunk_size: int
) -> tuple[Array, Array]:
    decay = jnp.exp(log_decay if log_decay.ndim == 4 else log_decay[..., None])
    sequences = [array.swapaxes(0, 1) for array in (query, key, value, decay, beta)]
    state, context = chunks.scan(_delta_token, state, sequences)
    return context.swapaxes(0, 1), state


def _delta_token(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
    query, key, value, decay, beta = now
    state = state * decay[..., None]
    # Products of matrices: to decode a token, einsum's parsing costs as much as the arithmetic.
    wrong = value[..., None, :] - key[..., None, :] @ state
    state = state + (beta[..., None] * key)[..., None] * wrong
    return state, (query[..., None, :] @ state)[..., 0, :]


def _delta_chunks(
    query: Array, key: Array, value: Array, log_decay: Array, beta: Array, state: Array, chunk_size: int
) -> tuple[Array, Array]:
    """Solve for the contribution of every token of a chunk, given those of earlier ones, then step over chunks."""
    tokens, heads = value.shape[1:3]
    query, key, value = (chunks.cut(one, "b (n t) h c -> n (b h) t c", chunk_size) for one in (query, key, value))
    log_decay, beta = (chunks.cut(array, "b (n t) h ... -> n (b h) t ...", chunk_size) for array in (log_decay, beta))
    weigh = _weigh_by_channel if log_decay.ndim == 4 else _weigh_by_head
    # u_t, what token t writes, depends on the earlier ones of its chunk: with K K^T decayed below the diagonal as L,
    # and S the state before the chunk, (1 + beta L) U = beta (V - since_start K S). So U = written - erased S, and
    # `written` and `erased` need no state.
    overlap, inside, until_end, since_start = weigh(query, key, log_decay)
    solved = _inverse(beta[..., None] * overlap) * beta[..., None, :]
    written, erased = solved @ value, solved @ (key * since_start)
    end = since_start[..., -1, :, None]
    # A token reads the state since the start of the chunk, and its key adds to the state at the end of it.
    sequences = (query * since_start, key * until_end, written, erased, inside, end)
    state, context = chunks.scan(_delta_chunk, rearrange(state, "b h c v -> (b h) c v"), sequences)
    state = rearrange(state, "(b h) c v -> b h c v", h=heads)
    return rearrange(context, "n (b h) t v -> b (n t) h v", h=heads)[:, :tokens], state


def _weigh_by_head(query: Array, key: Array, log_decay: Array) -> tuple[Array, Array, Array, Array]:
    """Return products of keys, and of queries, with earlier keys, and the decays until the end and since the start."""
    decay = chunks.decay_between(log_decay)
    since_start = jnp.exp(log_decay.cumsum(-1))[..., None]
    return (key @ key.mT) * decay, (query @ key.mT) * decay, decay[..., -1, :, None], since_start


def _weigh_by_channel(query: Array, key: Array, log_decay: Array) -> tuple[Array, Array, Array, Array]:
    """Like `_weigh_by_head`, with a decay per channel.

    The decay between two tokens is not factored into ``exp(sum)`` and ``exp(-sum)``, as the second overflows for strong
    gates.
    """
    decay = chunks.decay_between(log_decay.mT)
    left = rearrange(decay, "n b c t s -> n b t c s") * key.mT[:, :, None]
    products = jnp.stack([key, query], -2) @ left
    since_start = jnp.exp(log_decay.cumsum(-2))
    return products[..., 0, :], products[..., 1, :], decay[..., -1, :].mT, since_start


def _delta_chunk(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
    query, key, written, erased, inside, decay = now
    new = written - erased @ state
    context = query @ state + inside @ new
    return state * decay + key.mT @ new, context


def _inverse(matrix: Array) -> Array:
    """Return the inverse of ``1 + below``, where `below` is the strictly lower triangle of a matrix ``(..., T, T)``.

    It uses products alone: of the LAPACK solvers that XLA calls, two at once can wait for each other's threads for ever
    (jaxlib 0.10 on two cores).
    """
    return _inverse_in(jax.config.jax_default_matmul_precision, matrix)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _inverse_in(precision: str | None, matrix: Array) -> Array:
    return _inverse_by_halves(jnp.tril(matrix, -1))


@_inverse_in.defjvp
def _inverse_jvp(precision: str | None, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # JAX traces this when the context of the call, which had the precision, may have ended.
    with jax.default_matmul_precision(precision):
        inverse = _inverse_in(precision, *primals)
        return inverse, -inverse @ (jnp.tril(tangents[0], -1) @ inverse)


def _inverse_by_halves(below: Array) -> Array:
    """Return the inverse of ``1 + below``: of small blocks row by row, then of ever larger ones by those of halves."""
    size = below.shape[-1]
    width = min(BLOCK, size)
    count = 1
    while count * width < size:
        count *= 2
    missing = count * width - size
    below = jnp.pad(below, [(0, 0)] * (below.ndim - 2) + [(0, missing)] * 2)
    starts = [width * at for at in range(count)]
    inner = jnp.stack([below[..., at : at + width, at : at + width] for at in starts], -3)
    unit = jnp.eye(width, dtype=below.dtype)
    # Forward substitution: a row of the inverse is that of the unit matrix less the rows above, weighed by `below`.
    rows = [jnp.zeros_like(inner[..., :1, :]) + unit[:1]]  # sharded as the matrix is, as JAX's explicit axes require
    for at in range(1, width):
        rows.append(unit[at] - inner[..., at : at + 1, :at] @ jnp.concatenate(rows, -2))
    inverse = jnp.concatenate(rows, -2)
    while count > 1:
        count, half = count // 2, inverse.shape[-1]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        starts = [2 * half * at for at in range(count)]
        corners = jnp.stack([below[..., at + half : at + 2 * half, at : at + half] for at in starts], -3)
        # [[A, 0], [C, B]] has the inverse [[A', 0], [-B' C A', B']], of which both diagonal blocks are known.
        corner = -lower @ (corners @ upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], -1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], -1)], -2)
    return inverse[..., 0, :size, :size]


def _linear_tokens(query: Array, key: Array, value: Array, state: Array, chunk_size: int) -> tuple[Array, Array]:
    sequences = [rearrange(one, "b t h c -> t b h c") for one in (query, key, value)]
    state, context = chunks.scan(_linear_token, state, sequences)
    return rearrange(context, "t b h v -> b t h v"), state


def _linear_token(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
    query, key, value = now
    state = state + einsum(key, value, "b h c, b h v -> b h c v")
    return state, einsum(query, state, "b h c, b h c v -> b h v")


def _linear_chunks(query: Array, key: Array, value: Array, state: Array, chunk_size: int) -> tuple[Array, Array]:
    tokens, heads = value.shape[1:3]
    query, key, value = (chunks.cut(one, "b (n t) h c -> n (b h) t c", chunk_size) for one in (query, key, value))
    # The lower triangle with its diagonal: a token attends to itself, too.
    inside = query @ key.mT
    sequences = (query, key, value, jnp.tril(inside))
    state, context = chunks.scan(_linear_chunk, rearrange(state, "b h c v -> (b h) c v"), sequences)
    state = rearrange(state, "(b h) c v -> b h c v", h=heads)
    return rearrange(context, "n (b h) t v -> b (n t) h v", h=heads)[:, :tokens], state


def _linear_chunk(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
    query, key, value, inside = now
    context = query @ state + inside @ value
    return state + key.mT @ value, context
