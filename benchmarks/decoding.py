"""What a token costs with a long cache: attention to it next to raw SDPA in torch, and a whole step in both frameworks.

python -m benchmarks.decoding [--length 8192] [--rounds 15]

Everything is measured alternately in one process, and the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import transfer
from attn_bridge.masks import causal
from attn_bridge.specs import GroupedQueryAttentionConfig, Rotary
from torch_attn.functional import dot_product_attention

from . import jax_side, machine, torch_side

SIZES = {"12 heads of 64": (12, 12, 64), "32 heads of 128, 8 of keys": (32, 8, 128)}
"""Heads of queries and of keys, and their width."""

ROOM = 64
"""Tokens that the cache has room for beyond those in it, before the rounds."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"one token, float32, {options.length} tokens in the cache; milliseconds, median of {options.rounds}")
    for name, (heads, key_heads, width) in SIZES.items():
        config = GroupedQueryAttentionConfig(heads * width, heads, key_heads, width, position=Rotary())
        found = measure(config, options.length, options.rounds)
        sdpa = found["torch, raw SDPA"]
        print(name)
        for what, seconds in found.items():
            print(f"  {what:24}{1000 * seconds:8.2f}{seconds / sdpa:8.2f} x SDPA")
        print(f"  {programs(config, options.length)}")
    sides = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    print("\n".join(machine.sentences({**machine.describe(), "frameworks": sides})))


def measure(config: GroupedQueryAttentionConfig, length: int, rounds: int) -> dict[str, float]:
    """Return what is measured -> median seconds."""
    capacity = length + ROOM + 2 * rounds
    device = torch_side.device()
    in_torch = torch_attn.GroupedQueryAttention(config).eval()
    in_flax = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0))
    transfer(in_torch, in_flax)
    in_torch = in_torch.to(device)
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    kept = [draw(1, length, config.num_kv_heads, config.head_dim) for _ in range(2)]
    cache, _ = in_torch.init_cache(1, capacity).append(*(torch.from_numpy(one).to(device) for one in kept))
    state = {"flax": in_flax.init_cache(1, capacity).append(*map(jnp.asarray, kept))[0], "torch": cache}
    x, query = draw(1, 1, config.d_in), torch.from_numpy(draw(1, 1, config.num_heads, config.head_dim)).to(device)
    token = torch.from_numpy(x).to(device)
    step = flax_step()

    def sdpa() -> Any:
        held = state["torch"]
        key, value = (one[:, : held.length].transpose(1, 2) for one in (held.key, held.value))
        return torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), key, value, enable_gqa=True)

    def attend() -> Any:
        held = state["torch"]
        key, value = held.key[:, : held.length], held.value[:, : held.length]
        return dot_product_attention(query, key, value, mask=causal().offset(held.length - 1))

    def torch_step() -> Any:
        out, state["torch"] = in_torch(token, cache=state["torch"])
        return out

    def one_flax_step() -> Any:
        out, state["flax"] = step(*nnx.split(in_flax), x, state["flax"])
        return jax.block_until_ready(out)

    ways = {
        "torch, raw SDPA": sdpa,
        "torch, attention": attend,
        "torch, whole step": torch_step,
        "JAX, whole step": one_flax_step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for way in ways.values():
            way()
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                torch_side.wait(None)
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def flax_step() -> Any:
    """Return a step that gives the cache away."""
    return jax.jit(lambda graph, weights, x, cache: nnx.merge(graph, weights)(x, cache=cache), static_argnums=0,
                   donate_argnums=3)  # fmt: skip


def programs(config: GroupedQueryAttentionConfig, length: int) -> str:
    """Say how many programs a few steps in JAX compile, and what memory one needs beside the cache."""
    module = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0))
    step, cache = flax_step(), module.init_cache(1, length + ROOM)
    size = cache.key.nbytes + cache.value.nbytes
    x = np.ones((1, 1, config.d_in), np.float32)
    memory = step.lower(*nnx.split(module), x, cache).compile().memory_analysis()
    for _ in range(5):
        _, cache = step(*nnx.split(module), x, cache)
    share = memory.temp_size_in_bytes / size
    return f"JAX: {step._cache_size()} program for 5 steps; memory of a step {100 * share:.1f} % of the cache's"


if __name__ == "__main__":
    main()
