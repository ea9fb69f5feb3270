"""Sequences cut into chunks, a scan over them, and the decay of one token's contribution until another.

The twin is `jax_attn.recurrent.chunks`. Letters: b batch, t position (s an earlier one), n chunk, h head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..implementations.sizes import takes_other_sizes


def scan(
    step: Callable[..., tuple[Tensor, Tensor]], state: Tensor, sequences: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run ``(state, output) = step(state, elements)`` along the first axis of `sequences`; stack the outputs."""
    outputs = []
    for now in zip(*sequences, strict=True):
        state, output = step(state, now)
        outputs.append(output)
    return state, torch.stack(outputs)


def empty_state(value: Float[Tensor, "b t h v"], width: int) -> Float[Tensor, "b h width v"]:
    """Return the state before the first token: zeros, on the device of the values."""
    return value.new_zeros(value.shape[0], value.shape[2], width, value.shape[3])


def cut(array: Tensor, pattern: str, chunk_size: int) -> Tensor:
    """Cut the tokens into chunks; the last is filled up with zeros, which decay nothing and write nothing."""
    tokens = array.shape[1]
    if takes_other_sizes():  # a single chunk: a loop over chunks would fix their number, and the length by it
        return rearrange(array, pattern, n=1).contiguous()
    size = min(chunk_size, tokens)
    # No `pad`: of nothing it keeps the strides, which the compiler does not expect where the length is open.
    zeros = array.new_zeros(array.shape[0], -tokens % size, *array.shape[2:])
    filled = torch.cat([array, zeros], 1)
    return rearrange(filled, pattern, t=size).contiguous()  # once, not in each product


def decay_between(log_decay: Tensor) -> Tensor:
    """Return the decay ``(..., t, s)`` at t of a contribution from s, 0 where s is later.

    Every sum starts at its own s. Differences of running sums would cancel small summands behind large ones.
    """
    size = log_decay.shape[-1]
    after = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    total = torch.where(after, log_decay[..., :, None], 0.0).cumsum(-2)
    return torch.exp(torch.where(after.T, -torch.inf, total))


def accumulate(log_decay: Tensor, written: Tensor) -> Tensor:
    """Return ``total[t] = exp(log_decay[t]) * total[t - 1] + written[t]`` along the second axis of ``(b, t, k, c)``.

    Each of log2(t) rounds doubles the tokens that a total spans (Hillis and Steele 1986): no decay is divided by.
    """
    if takes_other_sizes():  # the number of rounds would depend on the length
        decay = decay_between(log_decay.permute(0, 2, 3, 1))
        return (decay @ written.permute(0, 2, 3, 1)[..., None])[..., 0].permute(0, 3, 1, 2)
    decay, span = torch.exp(log_decay), 1
    while span < written.shape[1]:
        later = written[:, span:] + decay[:, span:] * written[:, :-span]
        written = torch.cat([written[:, :span], later], 1)
        decay = torch.cat([decay[:, :span], decay[:, span:] * decay[:, :-span]], 1)
        span *= 2
    return written
