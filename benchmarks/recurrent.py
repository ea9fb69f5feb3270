"""The gated delta rule next to the torch reference of flash-linear-attention, as transformers has it for CPUs.

    python -m benchmarks.recurrent [--rounds 7]

Everything is measured alternately in one process, and the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import jax_attn.recurrent.recurrence
import torch_attn.recurrent.recurrence

from . import machine
from .sides import jax_side, torch_side

SHAPES = [(1, 2048, 16, 128), (2, 512, 8, 64), (1, 777, 4, 80)]
"""Batch, tokens, heads, and channels of a head."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"float32, milliseconds, median of {rounds}; times as long as the reference takes")
    for shape in SHAPES:
        for what, ways in (("forward", forward(*shape)), ("with gradients", with_gradients(*shape))):
            durations = measure(ways, rounds)
            baseline = durations["reference"]
            cells = [f"{name} {1000 * seconds:.1f} ({seconds / baseline:.2f})" for name, seconds in durations.items()]
            print(f"{shape} {what}: {', '.join(cells)}", flush=True)
    sides = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    print("\n".join(machine.sentences({**machine.describe(), "frameworks": sides})))


def operands(batch: int, tokens: int, heads: int, width: int) -> list[np.ndarray]:
    """Return queries, scaled, and keys of length one, values, logarithms of decays, and how much is written."""
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(batch, tokens, heads, width)) for _ in range(3))
    query, key = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (query, key))
    decay, beta = -0.3 * random.random((batch, tokens, heads)), random.random((batch, tokens, heads))
    return [one.astype(np.float32) for one in (query * width**-0.5, key, value, decay, beta)]


def forward(*shape: int) -> dict[str, Callable[[], object]]:
    """Return contender -> function that computes the context."""
    arrays = operands(*shape)
    tensors, in_jax = [torch.from_numpy(one) for one in arrays], [jnp.asarray(one) for one in arrays]
    run = jax.jit(lambda *inputs: jax_attn.recurrent.recurrence.gated_delta_rule(*inputs)[0])
    return {
        "reference": lambda: reference(*tensors),
        "torch": lambda: torch_attn.recurrent.recurrence.gated_delta_rule(*tensors)[0],
        "jax": lambda: run(*in_jax).block_until_ready(),
    }


def with_gradients(*shape: int) -> dict[str, Callable[[], object]]:
    """Return contender -> function that computes the gradients of all operands."""
    arrays = operands(*shape)
    in_jax = [jnp.asarray(one) for one in arrays]

    def total(*inputs: jax.Array) -> jax.Array:
        return jax_attn.recurrent.recurrence.gated_delta_rule(*inputs)[0].sum()

    run = jax.jit(jax.grad(total, argnums=tuple(range(5))))

    def gradients(function: Callable[..., torch.Tensor]) -> None:
        function(*(torch.from_numpy(one).requires_grad_() for one in arrays)).sum().backward()

    return {
        "reference": lambda: gradients(reference),
        "torch": lambda: gradients(lambda *inputs: torch_attn.recurrent.recurrence.gated_delta_rule(*inputs)[0]),
        "jax": lambda: jax.block_until_ready(run(*in_jax)),
    }


def reference(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return the reference's context; it scales queries itself."""
    scaled = query * query.shape[-1] ** 0.5
    return torch_chunk_gated_delta_rule(scaled, *others, use_qk_l2norm_in_kernel=False)[0]


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, taken in turns after a first call that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(one) for name, one in seconds.items()}


if __name__ == "__main__":
    main()
