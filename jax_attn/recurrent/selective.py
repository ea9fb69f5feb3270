"""The selective scan of Mamba (arXiv 2312.00752), token by token or chunk by chunk.

The twin is `torch_attn.recurrent.selective`. Letters: b batch, t position, n chunk, k number of a channel's state, c
channel.
"""

from __future__ import annotations

import jax.numpy as jnp
from einops import einsum, rearrange
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.recurrence import CHANNEL_CHUNK_SIZE, choose_form

from .. import functional
from . import chunks


def selective_scan(
    query: Float[Array, "B T K"],
    key: Float[Array, "B T K"],
    value: Float[Array, "B T C"],
    steps: Float[Array, "B T C"],
    rates: Float[Array, "C K"],
    *,
    state: Float[Array, "B 1 K C"] | None = None,
    form: str | None = None,
    chunk_size: int = CHANNEL_CHUNK_SIZE,
    sharding: object = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B 1 K C"]]:
    """Fade every channel's state, then write the channel's value under the token's key, then read.

    ``state = exp(rates * step) * state``; ``state += step * value * key``; ``context = query state``. All of it runs in
    float32, in float64 for float64 values.

    Args:
        query: ``(B, T, K)``, shared by all channels.
        key: ``(B, T, K)``, likewise.
        value: ``(B, T, C)``.
        steps: ``(B, T, C)``, 0 or more.
        rates: ``(C, K)``, below 0.
        state: ``(B, 1, K, C)`` that earlier tokens left; None is zeros.
        form: ``"chunked"`` or ``"recurrent"``; None takes chunks unless there is a single token.
        chunk_size: tokens of a chunk.
        sharding: devices that share the call, as `parallel.parallelize` gives it to modules.

    Returns:
        The context ``(B, T, C)`` and the new state, in the dtype of the computation.

    Raises:
        ValueError: an unknown form.
    """
    dtype = functional.wide_dtype(value)
    query, key, value, steps = (array.astype(dtype) for array in (query, key, value, steps))
    rates = rearrange(rates.astype(dtype), "c k -> k c")
    if state is None:
        state = chunks.empty_state(value[:, :, None], key.shape[2])
    chunked = choose_form(form, value.shape[1], chunk_size) == "chunked"
    run = _selective_chunks if chunked else _selective_tokens
    # XLA shares the arrays out: keys and queries read all channels, so that devices have no heads to themselves.
    context, state = run(query, key, value * steps, steps, rates, state[:, 0].astype(dtype), chunk_size)
    return context, state[:, None]


def mean_square_one(x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """Divide vectors by ``sqrt(mean of squares + eps)``, in float32, in float64 for float64 input."""
    wide = functional.widen(x)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)


def initial_rates(width: int, size: int, *, param_dtype: DTypeLike = jnp.float32) -> Float[Array, "C K"]:
    """Return the logarithms of 1 to `size` for every channel, the published start of ``A_log`` (S4D-Real)."""
    rates = jnp.arange(1, size + 1, dtype=param_dtype)
    return jnp.broadcast_to(jnp.log(rates), (width, size))


def _selective_tokens(
    query: Array, key: Array, value: Array, steps: Array, rates: Array, state: Array, chunk_size: int
) -> tuple[Array, Array]:
    def token(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, step = now
        state = state * jnp.exp(step[:, None, :] * rates) + key[:, :, None] * value[:, None, :]
        return state, einsum(query, state, "b k, b k c -> b c")

    sequences = [rearrange(array, "b t ... -> t b ...") for array in (query, key, value, steps)]
    state, context = chunks.scan(token, state, sequences)
    return rearrange(context, "t b c -> b t c"), state


def _selective_chunks(
    query: Array, key: Array, value: Array, steps: Array, rates: Array, state: Array, chunk_size: int
) -> tuple[Array, Array]:
    """Compute the states of all tokens of a chunk at once, from the last state of the chunk before."""

    def chunk(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, step = now
        log_decay = step[:, :, None, :] * rates
        written = key[..., None] * value[:, :, None, :]
        carried = jnp.exp(log_decay.cumsum(1)) * state[:, None]
        # The recurrence is linear: what the chunk writes from no state, plus the decayed state from before it.
        states = chunks.accumulate(log_decay, written) + carried
        return states[:, -1], einsum(query, states, "b t k, b t k c -> b t c")

    tokens = value.shape[1]
    sequences = [chunks.cut(array, "b (n t) c -> n b t c", chunk_size) for array in (query, key, value, steps)]
    state, context = chunks.scan(chunk, state, sequences)
    return rearrange(context, "n b t c -> b (n t) c")[:, :tokens], state
