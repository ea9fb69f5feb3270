"""Attention to a state that fades, token by token or chunk by chunk: the recurrence of Mamba-2 (arXiv 2405.21060).

The twin is `torch_attn.recurrent.decayed`. Letters: b batch, t position (s an earlier one), n chunk, k set of query and
key, g value heads that share it, h value head, c channel of query and key, v channel of value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from einops import einsum, rearrange, repeat
from jax import Array
from jaxtyping import Float

from attn_bridge.recurrence import CHUNK_SIZE, check_recurrence, choose_form
from attn_bridge.sharding.heads import check_width

from .. import functional
from . import chunks

if TYPE_CHECKING:
    from ..parallel.sharding import Sharding


def decayed_attention(
    query: Float[Array, "B T K D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T H Dv"],
    log_decay: Float[Array, "B T H"],
    *,
    state: Float[Array, "B H D Dv"] | None = None,
    form: str | None = None,
    chunk_size: int = CHUNK_SIZE,
    sharding: Sharding | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H D Dv"]]:
    """Forget, then write a value under its key, then read (arXiv 2405.21060, section 5).

    ``state = exp(log_decay) * state``; ``state += key value^T``; ``context = query state``. All of it runs in float32,
    in float64 for float64 values.

    Args:
        query: ``(B, T, K, D)``; K divides H, and value head ``i`` reads query and key head ``i // (H // K)``.
        key: ``(B, T, K, D)``.
        value: ``(B, T, H, Dv)``.
        log_decay: ``(B, T, H)``, 0 or less: its exponential is the share of the state that remains.
        state: ``(B, H, D, Dv)`` that earlier tokens left; None is zeros.
        form: ``"chunked"`` or ``"recurrent"``; None takes chunks unless there is a single token.
        chunk_size: tokens of a chunk.
        sharding: devices that share the call, as `parallel.parallelize` gives it to modules.

    Returns:
        The context ``(B, T, H, Dv)`` and the new state, in the dtype of the computation.

    Raises:
        ValueError: shapes that do not fit, or an unknown form.
    """
    arrays = (query, key, value, log_decay)
    check_recurrence([tuple(array.shape) for array in arrays], None if state is None else tuple(state.shape))
    dtype = functional.wide_dtype(value)
    query, key, value, log_decay = (array.astype(dtype) for array in arrays)
    if state is None:
        state = chunks.empty_state(value, key.shape[3])
    chunked = choose_form(form, value.shape[1], chunk_size) == "chunked"
    run = _decayed_chunks if chunked else _decayed_tokens
    sequences = (query, key, value, log_decay)
    if sharding is not None:
        return sharding.recur(run, sequences, state.astype(dtype), chunk_size)
    return run(*sequences, state.astype(dtype), chunk_size)


def step_sizes(
    steps: Float[Array, "B T H"], dt_bias: Float[Array, "H"], min_step: float, max_step: float | None
) -> Float[Array, "B T H"]:
    """Return ``softplus(steps + dt_bias)`` within its limits, in float32, in float64 for float64 input."""
    check_width("W_step", steps.shape[-1], dt_bias.shape[-1])
    dtype = functional.wide_dtype(steps)
    total = steps.astype(dtype) + dt_bias.astype(dtype)
    return jnp.clip(jnp.logaddexp(total, jnp.zeros_like(total)), min_step, max_step)


def initial_step_bias(drawn: Float[Array, "H"]) -> Float[Array, "H"]:
    """Return biases whose steps are spread evenly over the logarithms from 0.001 to 0.1, from draws of U[0, 1).

    Source: the inverse of the softplus, as in the published layer (state-spaces/mamba).
    """
    step = jnp.exp(drawn * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    return step + jnp.log(-jnp.expm1(-step))


def initial_log_rates(drawn: Float[Array, "H"], least: float = 1.0) -> Float[Array, "H"]:
    """Return logarithms of rates that are spread evenly from `least` to 16, from draws of U[0, 1).

    Source: the start of ``A_log`` in the published layer (state-spaces/mamba).
    """
    return jnp.log(least + (16.0 - least) * drawn)


def _decayed_tokens(
    query: Array, key: Array, value: Array, log_decay: Array, state: Array, chunk_size: int
) -> tuple[Array, Array]:
    groups = value.shape[2] // key.shape[2]
    query, key = (repeat(array, "b t k c -> b t (k g) c", g=groups) for array in (query, key))
    sequences = [rearrange(array, "b t ... -> t b ...") for array in (query, key, value, jnp.exp(log_decay))]
    state, context = chunks.scan(_decayed_token, state, sequences)
    return rearrange(context, "t b h v -> b t h v"), state


def _decayed_token(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
    query, key, value, decay = now
    state = state * decay[..., None, None] + einsum(key, value, "b h c, b h v -> b h c v")
    return state, einsum(query, state, "b h c, b h c v -> b h v")


def _decayed_chunks(
    query: Array, key: Array, value: Array, log_decay: Array, state: Array, chunk_size: int
) -> tuple[Array, Array]:
    """Compute all chunks at once but for their states, which one step per chunk makes; groups share their products."""
    tokens, heads = value.shape[1:3]
    groups = heads // key.shape[2]
    query, key = (chunks.cut(array, "b (n t) k c -> n (b k) t c", chunk_size) for array in (query, key))
    value = chunks.cut(
        rearrange(value, "b t (k g) v -> b t k g v", g=groups), "b (n t) k g v -> n (b k) g t v", chunk_size
    )
    log_decay = chunks.cut(
        rearrange(log_decay, "b t (k g) -> b t k g", g=groups), "b (n t) k g -> n (b k) g t", chunk_size
    )
    decay = chunks.decay_between(log_decay)
    # The blocks of the semiseparable matrix (arXiv 2405.21060, section 6): those on the diagonal are attention within a
    # chunk, weighed by decay; those below go through the states at the ends of chunks.
    inside = ((query @ key.mT)[:, :, None] * decay) @ value
    until_end = rearrange(value * decay[..., -1, :, None], "n b g t v -> n b t (g v)")
    since_start = jnp.exp(log_decay.cumsum(-1))[..., None]
    state = rearrange(state, "b (k g) c v -> (b k) g c v", g=groups)
    written = rearrange(key.mT @ until_end, "n b c (g v) -> n b g c v", g=groups)
    # The only step that is sequential: one per chunk, not one per token.
    state, before = chunks.scan(_decayed_chunk, state, (written, since_start[..., -1:, :]))
    read = query @ rearrange(before, "n b g c v -> n b c (g v)")
    context = inside + rearrange(read, "n b t (g v) -> n b g t v", g=groups) * since_start
    # In two steps, as JAX joins one pair of axes at a time where axes of a mesh are explicit.
    context = rearrange(context, "n (b k) g t v -> b n t (k g) v", k=heads // groups)
    context = rearrange(context, "b n t h v -> b (n t) h v")
    return context[:, :tokens], rearrange(state, "(b k) g c v -> b (k g) c v", k=heads // groups)


def _decayed_chunk(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the state behind a chunk, and the one before it, which its tokens read."""
    written, decay = now
    return state * decay + written, state
