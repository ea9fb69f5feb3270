"""The gain of bfloat16 over float32 in `cpu_flash`, with torch's own kernel for comparison, on this processor.

python -m benchmarks.bfloat16 [--shape 4,1024,12,64 ...] [--rounds 5]

Causal attention, measured alternately in one process; the median of the rounds is shown. torch runs eagerly, JAX
compiled; gradients are those of query, key and value.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_attn.functional
import torch_attn.functional
from attn_bridge.masks import causal

from .measuring import machine
from .sides import jax_side, torch_side

SHAPES = ("4,1024,12,64", "1,4096,12,64", "8,256,12,64", "2,2048,8,128")
DTYPES = ("float32", "bfloat16")
PAUSE = 0.02
"""Seconds before a call: OpenMP's threads wait busily for a while after torch's."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="batch, tokens, heads, width of a head")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for shape, gradients in itertools.product(options.shape, (False, True)):
        sizes = [int(size) if size.isdecimal() else 0 for size in shape.split(",")]
        if len(sizes) != 4 or 0 in sizes:
            parser.error(f"--shape ({shape}) must be four whole numbers above 0 such as 4,1024,12,64")
        seconds = measure(sizes, gradients, options.rounds)
        print(f"{shape}, {'forward and backward' if gradients else 'forward'}; ms, median of {options.rounds}")
        for side in ("torch sdpa", "torch cpu_flash", "jax cpu_flash"):
            wide, narrow = (seconds[side, dtype] for dtype in DTYPES)
            print(f"  {side:16}float32 {1000 * wide:8.1f}   bfloat16 {1000 * narrow:8.1f}   {wide / narrow:5.2f} times")
        share = [seconds["torch cpu_flash", dtype] / seconds["torch sdpa", dtype] for dtype in DTYPES]
        print(
            f"  torch: cpu_flash takes {share[0]:.2f} of sdpa's time in float32, {share[1]:.2f} in bfloat16", flush=True
        )
    sides = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    print("\n".join(machine.sentences({**machine.describe(), "frameworks": sides})))


def measure(sizes: list[int], gradients: bool, rounds: int) -> dict[tuple[str, str], float]:
    """Return (contender, dtype) -> median seconds."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(sizes, np.float32) for _ in range(4)]
    ways: dict[tuple[str, str], Callable[[], object]] = {}
    for dtype in DTYPES:
        tensors = [torch.from_numpy(one).to(getattr(torch, dtype)) for one in arrays]
        for name in ("sdpa", "cpu_flash"):
            ways[f"torch {name}", dtype] = in_torch(tensors, name, gradients)
        ways["jax cpu_flash", dtype] = in_jax([jnp.asarray(one, dtype) for one in arrays], gradients)
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for key, way in ways.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            way()
            if number > 1:  # the first compiles
                seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(times) for key, times in seconds.items()}


def in_torch(tensors: list[torch.Tensor], name: str, gradients: bool) -> Callable[[], object]:
    """Return a call of torch."""
    *inputs, cotangent = tensors

    def run() -> object:
        with torch.set_grad_enabled(gradients):
            own = [one.detach().requires_grad_(gradients) for one in inputs]
            out = torch_attn.functional.dot_product_attention(*own, mask=causal(), implementation=name)
        return torch.autograd.grad(out, own, cotangent) if gradients else out

    return run


def in_jax(arrays: list[jax.Array], gradients: bool) -> Callable[[], object]:
    """Return a call of JAX."""

    def attend(*inputs: jax.Array) -> jax.Array:
        return jax_attn.functional.dot_product_attention(*inputs, mask=causal(), implementation="cpu_flash")

    def both(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(attend, *operands[:3])[1](operands[3]) if gradients else attend(*operands[:3])

    compiled = jax.jit(both)
    return lambda: jax.block_until_ready(compiled(*arrays))


if __name__ == "__main__":
    main()
