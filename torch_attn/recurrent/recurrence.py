"""Attention that keeps a matrix per head instead of keys: token by token, or the same numbers chunk by chunk.

The twin is `jax_attn.recurrent.recurrence`. Letters: b batch, t position (s an earlier one), n chunk, h head, g value
heads per query head, c channel of query and key, v channel of value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from attn_bridge.masks import Mask, as_mask
from attn_bridge.recurrence import CHUNK_SIZE, check_recurrence, check_state, check_token_mask, choose_form
from attn_bridge.sharding.heads import check_width

from .. import functional
from ..operations.arrays import as_tensor
from ..operations.autocast import without_autocast
from . import chunks

if TYPE_CHECKING:
    from ..parallel.schemes.recurrent import DeviceLine

BLOCK = 8
"""Rows of the blocks that a triangular system is solved by where it is by products."""


def gated_delta_rule(
    query: Float[Tensor, "B T K D"],
    key: Float[Tensor, "B T K D"],
    value: Float[Tensor, "B T H Dv"],
    log_decay: Float[Tensor, "B T H"] | Float[Tensor, "B T H D"],
    beta: Float[Tensor, "B T H"],
    *,
    state: Float[Tensor, "B H D Dv"] | None = None,
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
    sharding: DeviceLine | None = None,
) -> tuple[Float[Tensor, "B T H Dv"], Float[Tensor, "B H D Dv"]]:
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
    query, key, value, log_decay, beta = (one.to(dtype) for one in arrays)
    groups = value.shape[2] // key.shape[2]
    if groups > 1:
        query = repeat(query, "b t h c -> b t (h g) c", g=groups)
        key = repeat(key, "b t h c -> b t (h g) c", g=groups)
    if state is None:
        state = chunks.empty_state(value, key.shape[3])
    chunked = choose_form(form, value.shape[1], chunk_size) == "chunked"
    with without_autocast(value):
        run = _delta_chunks if chunked else _delta_tokens
        sequences = (query, key, value, log_decay, beta)
        if sharding is not None:
            return sharding.recur(run, sequences, state.to(dtype), chunk_size)
        return run(*sequences, state.to(dtype), chunk_size)


def linear_attention(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    value: Float[Tensor, "B T H Dv"],
    *,
    state: Float[Tensor, "B H D Dv+1"] | None = None,
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
    sharding: DeviceLine | None = None,
) -> tuple[Float[Tensor, "B T H Dv"], Float[Tensor, "B H D Dv+1"]]:
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
    query, key, value = (one.to(dtype) for one in (query, key, value))
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    shape = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    check_state(None if state is None else tuple(state.shape), shape)
    state = chunks.empty_state(value, key.shape[3]) if state is None else state.to(dtype)
    chunked = choose_form(form, value.shape[1], chunk_size) == "chunked"
    with without_autocast(value):
        run = _linear_chunks if chunked else _linear_tokens
        if sharding is not None:
            context, state = sharding.recur(run, (query, key, value), state, chunk_size)
        else:
            context, state = run(query, key, value, state, chunk_size)
    # The channel of ones has gone through the same sums as the values: it is the sum of the weights.
    total = context[..., -1:]
    return _share(context[..., :-1], _divisor(total)), state


def unit_length(x: Float[Tensor, "... c"], eps: float = 1e-6) -> Float[Tensor, "... c"]:
    """Divide vectors by ``sqrt(sum of squares + eps)``, in float32, in float64 for float64 input."""
    wide = functional.widen(x)
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)


def log_decay(
    alpha: Float[Tensor, "B T H"], dt_bias: Float[Tensor, "H"], a_log: Float[Tensor, "H"]
) -> Float[Tensor, "B T H"]:
    """Return ``-exp(a_log) * softplus(alpha + dt_bias)``, in float32, in float64 for float64 input."""
    check_width("W_alpha", alpha.shape[-1], dt_bias.shape[-1])
    check_width("A_log", a_log.shape[0], dt_bias.shape[0])
    dtype = functional.wide_dtype(alpha)
    total = alpha.to(dtype) + dt_bias.to(dtype)
    # The softplus of torch is linear above 20, 2e-9 off.
    return -torch.exp(a_log.to(dtype)) * torch.logaddexp(total, torch.zeros_like(total))


def positive_features(x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """Return ``elu(x) + 1``, above 0, in float32, in float64 for float64 input."""
    # Where x is negative that is its exponential, and 1 would swallow it if it were added and subtracted.
    wide = functional.widen(x)
    return torch.where(wide > 0, wide + 1.0, torch.exp(wide.clamp(max=0.0)))


def relative_features(x: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """Return `positive_features` of queries, scaled so that each query's largest is 1; the later division cancels that.

    So a query far below zero in all channels has non-zero features, and a gradient that does not overflow.
    """
    wide = functional.widen(x)
    top = wide.detach().amax(-1, keepdim=True)
    low = torch.exp(wide.clamp(max=0.0) - top.clamp(max=0.0))
    return torch.where(wide > 0, wide + 1.0, low) / (top.clamp(min=0.0) + 1.0)


def _divisor(total: Tensor) -> Tensor:
    """Return the divisor: `total`, or 1 for a query that has met no key, to avoid 0 / 0.

    A sum below the smallest normal number counts as no key: XLA flushes it to 0, and 1 over it overflows.
    """
    return torch.where(total < torch.finfo(total.dtype).tiny, 1.0, total)


def _share(part: Tensor, total: Tensor) -> Tensor:
    """Divide; torch's own derivative divides twice, and so overflows late."""
    return part / total


def linear_weights(
    query: Float[Tensor, "B T H D"], key: Float[Tensor, "B S H D"], mask: Mask
) -> Float[Tensor, "B H T S"]:
    """Return the products of features, divided by their sum over the keys that `mask` shows; zeros where there is none.

    Raises:
        TypeError: a mask that is not bool.
        ValueError: a mask that does not broadcast.
    """
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    allowed = functional.visible_keys(mask, shape, query)
    with without_autocast(query):
        products = torch.where(allowed, einsum(query, key, "b t h c, b s h c -> b h t s"), 0.0)
    total = products.sum(-1, keepdim=True)
    return _share(products, _divisor(total))


def average(weights: Float[Tensor, "B H T S"], value: Float[Tensor, "B S H Dv"]) -> Float[Tensor, "B T H Dv"]:
    """Return the averages of the values, in the dtype of the weights."""
    with without_autocast(weights):
        return einsum(weights, value.to(weights.dtype), "b h t s, b s h v -> b t h v")


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
    return None if array is None else functional.shape_of(as_tensor(array))


def _array_of(attention_mask: object) -> Any:
    """Return a mask unchanged if it is an array or nested lists; None if it is an `attn_bridge.masks` description."""
    is_description = as_mask(attention_mask) is attention_mask  # it refuses what is neither
    return None if is_description else attention_mask


def visible_tokens(
    attention_mask: Mask | Bool[Tensor, "..."] | None, x: Float[Tensor, "B T D"], cache: Any = None
) -> Bool[Tensor, "B T"] | None:
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
        mask = functional.as_placed(attention_mask, x.device).placed(x.shape[1], longest)
        array = mask.allowed(
            torch.arange(x.shape[1], device=x.device)[:, None], torch.arange(longest, device=x.device)[None, :]
        )
        array = array[(None,) * (4 - array.ndim)]
    array = functional.as_visible(torch.as_tensor(array, device=x.device))
    shape = tuple(array.shape)
    check_token_mask(shape, functional.dtype_name(array), x.shape[0], x.shape[1], longest)
    bare = array.reshape(shape[0], shape[-1])
    if len(shape) == 2:
        functional.look_at_mask(bare, (x.shape[0], 1, x.shape[1], shape[1]))
    start = 0 if cache is None else int(cache.length)
    return bare[:, start : start + x.shape[1]].expand(x.shape[0], x.shape[1])


def without(array: Float[Tensor, "B T ..."], visible: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T ..."]:
    """Return an array with zeros at the tokens that do not count."""
    if visible is None:
        return array
    return torch.where(visible.reshape(*visible.shape, *(1,) * (array.ndim - 2)), array, 0.0)


def _delta_tokens(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    decay = torch.exp(log_decay if log_decay.ndim == 4 else log_decay[..., None])
    sequences = [array.swapaxes(0, 1) for array in (query, key, value, decay, beta)]
    state, context = chunks.scan(_delta_token, state, sequences)
    return context.swapaxes(0, 1), state


def _delta_token(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    query, key, value, decay, beta = now
    state = state * decay[..., None]
    # Products of matrices: to decode a token, einsum's parsing costs as much as the arithmetic.
    wrong = value[..., None, :] - key[..., None, :] @ state
    state = state + (beta[..., None] * key)[..., None] * wrong
    return state, (query[..., None, :] @ state)[..., 0, :]


def _delta_chunks(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
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


def _weigh_by_head(query: Tensor, key: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return products of keys, and of queries, with earlier keys, and the decays until the end and since the start."""
    decay = chunks.decay_between(log_decay)
    since_start = torch.exp(log_decay.cumsum(-1))[..., None]
    return (key @ key.mT) * decay, (query @ key.mT) * decay, decay[..., -1, :, None], since_start


def _weigh_by_channel(query: Tensor, key: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `_weigh_by_head`, with a decay per channel.

    The decay between two tokens is not factored into ``exp(sum)`` and ``exp(-sum)``, as the second overflows for strong
    gates.
    """
    decay = chunks.decay_between(log_decay.mT)
    left = rearrange(decay, "n b c t s -> n b t c s") * key.mT[:, :, None]
    products = torch.stack([key, query], -2) @ left
    since_start = torch.exp(log_decay.cumsum(-2))
    return products[..., 0, :], products[..., 1, :], decay[..., -1, :].mT, since_start


def _delta_chunk(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    query, key, written, erased, inside, decay = now
    new = torch.baddbmm(written, erased, state, alpha=-1)
    context = torch.baddbmm(query @ state, inside, new)
    return torch.baddbmm(state * decay, key.mT, new), context


def _inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of ``1 + below``, where `below` is the strictly lower triangle of a matrix ``(..., T, T)``."""
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():  # ONNX solves no triangular systems
        return _inverse_by_halves(torch.tril(matrix, -1))
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_triangular(matrix, unit.expand_as(matrix), upper=False, unitriangular=True)


def _inverse_by_halves(below: Tensor) -> Tensor:
    """Return the inverse of ``1 + below`` by products: of small blocks row by row, then of larger ones by halves.

    Raises:
        NotImplementedError: a length that is left open, and with it the number of blocks.
    """
    size = below.shape[-1]
    if not isinstance(size, int):
        advice = "export for one number of tokens (no dynamic axis), or use torch.export"
        raise NotImplementedError(f"ONNX has no operator for a triangular system of any length: {advice}")
    width = min(BLOCK, size)
    count = 1
    while count * width < size:
        count *= 2
    missing = count * width - size
    below = torch.nn.functional.pad(below, (0, missing, 0, missing))
    starts = [width * at for at in range(count)]
    inner = torch.stack([below[..., at : at + width, at : at + width] for at in starts], -3)
    unit = torch.eye(width, dtype=below.dtype, device=below.device)
    # Forward substitution: a row of the inverse is that of the unit matrix less the rows above, weighed by `below`.
    rows = [unit[:1].expand(*inner.shape[:-2], 1, width)]
    for at in range(1, width):
        rows.append(unit[at] - inner[..., at : at + 1, :at] @ torch.cat(rows, -2))
    inverse = torch.cat(rows, -2)
    while count > 1:
        count, half = count // 2, inverse.shape[-1]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        starts = [2 * half * at for at in range(count)]
        corners = torch.stack([below[..., at + half : at + 2 * half, at : at + half] for at in starts], -3)
        # [[A, 0], [C, B]] has the inverse [[A', 0], [-B' C A', B']], of which both diagonal blocks are known.
        corner = -lower @ (corners @ upper)
        top = torch.cat([upper, torch.zeros_like(upper)], -1)
        inverse = torch.cat([top, torch.cat([corner, lower], -1)], -2)
    return inverse[..., 0, :size, :size]


def _linear_tokens(query: Tensor, key: Tensor, value: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    sequences = [rearrange(one, "b t h c -> t b h c") for one in (query, key, value)]
    state, context = chunks.scan(_linear_token, state, sequences)
    return rearrange(context, "t b h v -> b t h v"), state


def _linear_token(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    query, key, value = now
    state = state + einsum(key, value, "b h c, b h v -> b h c v")
    return state, einsum(query, state, "b h c, b h c v -> b h v")


def _linear_chunks(query: Tensor, key: Tensor, value: Tensor, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    tokens, heads = value.shape[1:3]
    query, key, value = (chunks.cut(one, "b (n t) h c -> n (b h) t c", chunk_size) for one in (query, key, value))
    # The lower triangle with its diagonal: a token attends to itself, too.
    inside = query @ key.mT
    sequences = (query, key, value, torch.tril(inside))
    state, context = chunks.scan(_linear_chunk, rearrange(state, "b h c v -> (b h) c v"), sequences)
    state = rearrange(state, "(b h) c v -> b h c v", h=heads)
    return rearrange(context, "n (b h) t v -> b (n t) h v", h=heads)[:, :tokens], state


def _linear_chunk(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    query, key, value, inside = now
    context = torch.baddbmm(query @ state, inside, value)
    return torch.baddbmm(state, key.mT, value), context
