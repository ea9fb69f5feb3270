"""Sequences cut into chunks, a scan over them, and the decay of one token's contribution until another.

The twin is `torch_attn.recurrent.chunks`. Letters: b batch, t position (s an earlier one), n chunk, h head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jaxtyping import Float

from ..implementations.block_operands import varying_with


def scan(step: Callable[..., tuple[Array, Array]], state: Array, sequences: Sequence[Array]) -> tuple[Array, Array]:
    """Run ``(state, output) = step(state, elements)`` along the first axis of `sequences`; stack the outputs."""
    # A state of zeros is the same on all devices of a `jax.shard_map`, and the states that follow it are not.
    return jax.lax.scan(step, varying_with((state, sequences), state), tuple(sequences))


def empty_state(value: Float[Array, "b t h v"], width: int) -> Float[Array, "b h width v"]:
    """Return the state before the first token: zeros, sharded over the devices of a mesh as the values are."""
    row = jnp.zeros_like(value[:, 0, :, None, :])
    return jnp.broadcast_to(row, (*row.shape[:2], width, row.shape[3]))


def cut(array: Array, pattern: str, chunk_size: int) -> Array:
    """Cut the tokens into chunks; the last is filled up with zeros, which decay nothing and write nothing."""
    tokens = array.shape[1]
    size = min(chunk_size, tokens) if isinstance(tokens, int) else chunk_size  # else jax.export leaves it open
    filled = jnp.pad(array, [(0, 0), (0, -(-tokens // size) * size - tokens), *[(0, 0)] * (array.ndim - 2)])
    return rearrange(filled, pattern, t=size)


def decay_between(log_decay: Array) -> Array:
    """Return the decay ``(..., t, s)`` at t of a contribution from s, 0 where s is later.

    Every sum starts at its own s. Differences of running sums would cancel small summands behind large ones.
    """
    size = log_decay.shape[-1]
    after = jnp.tri(size, k=-1, dtype=bool)
    total = jnp.where(after, log_decay[..., :, None], 0.0).cumsum(-2)
    return jnp.exp(jnp.where(after.T, -jnp.inf, total))


def accumulate(log_decay: Array, written: Array) -> Array:
    """Return ``total[t] = exp(log_decay[t]) * total[t - 1] + written[t]`` along the second axis of ``(b, t, k, c)``.

    Each of log2(t) rounds doubles the tokens that a total spans (Hillis and Steele 1986): no decay is divided by.
    """
    decay, span = jnp.exp(log_decay), 1
    while span < written.shape[1]:
        later = written[:, span:] + decay[:, span:] * written[:, :-span]
        written = jnp.concatenate([written[:, :span], later], 1)
        decay = jnp.concatenate([decay[:, :span], decay[:, span:] * decay[:, :-span]], 1)
        span *= 2
    return written
