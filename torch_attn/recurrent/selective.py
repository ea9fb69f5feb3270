"""The selective scan of Mamba (arXiv 2312.00752), token by token or chunk by chunk.

The twin is `jax_attn.recurrent.selective`. Letters: b batch, t position, n chunk, k number of a channel's state, c
channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from attn_bridge.recurrence import CHANNEL_CHUNK_SIZE, choose_form

from .. import functional
from ..operations.autocast import without_autocast
from . import chunks

if TYPE_CHECKING:
    from ..parallel.schemes.recurrent import DeviceLine


def selective_scan(
    query: Float[Tensor, "B T K"],
    key: Float[Tensor, "B T K"],
    value: Float[Tensor, "B T C"],
    steps: Float[Tensor, "B T C"],
    rates: Float[Tensor, "C K"],
    *,
    state: Float[Tensor, "B 1 K C"] | None = None,
    form: str | None = None,
    chunk_size: int = CHANNEL_CHUNK_SIZE,
    sharding: DeviceLine | None = None,
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B 1 K C"]]:
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
    query, key, value, steps = (array.to(dtype) for array in (query, key, value, steps))
    rates = rearrange(rates.to(dtype), "c k -> k c")
    if state is None:
        state = chunks.empty_state(value[:, :, None], key.shape[2])
    chunked = choose_form(form, value.shape[1], chunk_size) == "chunked"
    with without_autocast(value):
        run = _selective_chunks if chunked else _selective_tokens
        sequences = (query, key, value * steps, steps, rates)
        if sharding is not None:
            context, state = sharding.recur(run, sequences, state[:, 0].to(dtype), chunk_size)
        else:
            context, state = run(*sequences, state[:, 0].to(dtype), chunk_size)
    return context, state[:, None]


def mean_square_one(x: Float[Tensor, "... d"], eps: float) -> Float[Tensor, "... d"]:
    """Divide vectors by ``sqrt(mean of squares + eps)``, in float32, in float64 for float64 input."""
    wide = functional.widen(x)
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype)


def initial_rates(
    width: int, size: int, *, device: Device = None, dtype: torch.dtype | None = None
) -> Float[Tensor, "C K"]:
    """Return the logarithms of 1 to `size` for every channel, the published start of ``A_log`` (S4D-Real)."""
    rates = torch.arange(1, size + 1, device=device, dtype=dtype or torch.get_default_dtype())
    return torch.log(rates).expand(width, size).clone()


def _selective_tokens(
    query: Tensor, key: Tensor, value: Tensor, steps: Tensor, rates: Tensor, state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    def token(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query, key, value, step = now
        state = state * torch.exp(step[:, None, :] * rates) + key[:, :, None] * value[:, None, :]
        return state, einsum(query, state, "b k, b k c -> b c")

    sequences = [rearrange(array, "b t ... -> t b ...") for array in (query, key, value, steps)]
    state, context = chunks.scan(token, state, sequences)
    return rearrange(context, "t b c -> b t c"), state


def _selective_chunks(
    query: Tensor, key: Tensor, value: Tensor, steps: Tensor, rates: Tensor, state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute the states of all tokens of a chunk at once, from the last state of the chunk before."""

    def chunk(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query, key, value, step = now
        log_decay = step[:, :, None, :] * rates
        written = key[..., None] * value[:, :, None, :]
        carried = torch.exp(log_decay.cumsum(1)) * state[:, None]
        # The recurrence is linear: what the chunk writes from no state, plus the decayed state from before it.
        states = chunks.accumulate(log_decay, written) + carried
        return states[:, -1], einsum(query, states, "b t k, b t k c -> b t c")

    tokens = value.shape[1]
    sequences = [chunks.cut(array, "b (n t) c -> n b t c", chunk_size) for array in (query, key, value, steps)]
    state, context = chunks.scan(chunk, state, sequences)
    return rearrange(context, "n b t c -> b (n t) c")[:, :tokens], state
