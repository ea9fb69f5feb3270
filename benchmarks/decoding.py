"""The cost of a token with a long cache: attention next to a stream over the same bytes, and a step in both frameworks.

python -m benchmarks.decoding [--length 8192 32768] [--batch 1 8] [--dtype float32 bfloat16] [--rounds 15] [--best]

Everything is measured alternately in one process, and the median of the rounds is shown, or the best. A round calls
each several times in a row, as decoding does, and times the last call. The stream (`measuring.stream`) reads the bytes
of the keys and values on all cores and sums them; it does not run on a GPU. The last line of a cache is what limits
attention: the floating-point operations of its products, and their time at the rate of torch's product of two squares.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import statistics
import time

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
from jax_attn.functional import dot_product_attention as jax_dot_product_attention
from torch_attn.functional import dot_product_attention

from .measuring import machine
from .sides import jax_side, torch_side

SIZES = {"12 heads of 64": (12, 12, 64), "32 heads of 128, 8 of keys": (32, 8, 128)}
"""Heads of queries and of keys, and their width."""

ROOM = 64
"""Tokens that the cache has room for beyond those in it, before the rounds."""

CALLS = 5
"""Calls in a row. The first three behind another contender took up to twice as long as the next, on a Xeon."""

SQUARE = 2048
"""Edge of the matrices of the product that floating-point operations are compared with."""

PAUSE = 0.02
"""Seconds before a round. OpenMP's threads wait busily for a while after torch's calls, which therefore come last."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[8192], help="tokens in the cache")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--best", action="store_true", help="show the best round, as on a machine that others use, too")
    options = parser.parse_args()
    cells = itertools.product(options.length, options.batch, options.dtype, SIZES.items())
    for length, batch, dtype, (name, (heads, key_heads, width)) in cells:
        config = GroupedQueryAttentionConfig(heads * width, heads, key_heads, width, position=Rotary())
        seconds = measure(config, length, options.rounds, batch, dtype)
        durations = {way: (min if options.best else statistics.median)(times) for way, times in seconds.items()}
        what = "stream" if "stream" in durations else "torch, raw SDPA"
        size = 2 * batch * length * key_heads * width * (4 if dtype == "float32" else 2)
        print(
            f"{name}, {dtype}, {batch} x {length} tokens in the cache, {size / 2**20:.0f} MiB; "
            f"{'best' if options.best else 'median'} of {options.rounds}"
        )
        for way, seconds in durations.items():
            share = "" if "step" in way else f"{100 * durations[what] / seconds:6.0f} % of the speed of {what}"
            print(f"  {way:24}{1000 * seconds:9.2f} ms{size / seconds / 1e9:7.1f} GB/s{share}")
        print(f"  JAX's step takes {durations['JAX, whole step'] / durations['torch, whole step']:.2f} times torch's")
        print(f"  {products(config, length, batch, options.rounds)}")
        print(f"  {programs(config, length, batch, dtype)}", flush=True)
    sides = {"torch": torch_side.describe(), "jax": jax_side.describe()}
    print("\n".join(machine.sentences({**machine.describe(), "frameworks": sides})))


def measure(
    config: GroupedQueryAttentionConfig, length: int, rounds: int, batch: int = 1, dtype: str = "float32"
) -> dict[str, list[float]]:
    """Return measurement -> seconds of each round."""
    capacity = length + ROOM + 2 * CALLS * (rounds + 1)
    device = torch_side.device()
    in_torch = torch_attn.GroupedQueryAttention(config, dtype=getattr(torch, dtype)).eval()
    in_flax = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype)
    transfer(in_torch, in_flax)
    in_torch = in_torch.to(device)
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(size=shape, dtype=np.float32)

    kept = [draw(batch, length, config.num_kv_heads, config.head_dim) for _ in range(2)]
    torch_arrays = [torch.from_numpy(one).to(device, getattr(torch, dtype)) for one in kept]
    cache, _ = in_torch.init_cache(batch, capacity).append(*torch_arrays)
    state = {"flax": in_flax.init_cache(batch, capacity).append(*(jnp.asarray(one, dtype) for one in kept))[0],
             "torch": cache}  # fmt: skip
    jax_arrays = [jnp.array(one) for one in (state["flax"].key, state["flax"].value)]  # a step gives its cache away
    x, query = draw(batch, 1, config.d_in), draw(batch, 1, config.num_heads, config.head_dim)
    token, asked = (torch.from_numpy(one).to(device, getattr(torch, dtype)) for one in (x, query))
    x, query = jnp.asarray(x, dtype), jnp.asarray(query, dtype)
    step, graph, weights = flax_step(), *nnx.split(in_flax)
    in_jax = jax.jit(lambda *inputs: jax_dot_product_attention(*inputs, mask=causal().offset(length - 1)))

    def sdpa() -> object:
        torch_cache = state["torch"]
        key, value = (one[:, :length].transpose(1, 2) for one in (torch_cache.key, torch_cache.value))
        return torch.nn.functional.scaled_dot_product_attention(asked.transpose(1, 2), key, value, enable_gqa=True)

    def attend() -> object:
        torch_cache = state["torch"]
        return dot_product_attention(
            asked, torch_cache.key[:, :length], torch_cache.value[:, :length], mask=causal().offset(length - 1)
        )

    def torch_step() -> object:
        out, state["torch"] = in_torch(token, cache=state["torch"])
        return out

    def one_flax_step() -> object:
        out, state["flax"] = step(graph, weights, x, state["flax"])
        return jax.block_until_ready(out)

    ways = {
        "JAX, attention": lambda: jax.block_until_ready(in_jax(query, *jax_arrays)),
        "JAX, whole step": one_flax_step,
        "torch, raw SDPA": sdpa,
        "torch, attention": attend,
        "torch, whole step": torch_step,
    }
    if device.type == "cpu" and importlib.util.find_spec("llvmlite"):
        bits = [sequence[:length].view(np.uint8) for one in jax_arrays for sequence in np.asarray(one)]
        ways = {"stream": importlib.import_module("benchmarks.measuring.stream").reader(bits), **ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for way in ways.values():
            way()
        for _ in range(rounds):
            time.sleep(PAUSE)
            for name, way in ways.items():
                for _ in range(CALLS - 1):
                    way()
                torch_side.wait(None)
                start = time.perf_counter()
                way()
                torch_side.wait(None)
                seconds[name].append(time.perf_counter() - start)
    return seconds


def flax_step() -> object:
    """Return a step that gives the cache away."""
    return jax.jit(lambda graph, weights, x, cache: nnx.merge(graph, weights)(x, cache=cache), static_argnums=0,
                   donate_argnums=3)  # fmt: skip


def products(config: GroupedQueryAttentionConfig, length: int, batch: int, rounds: int) -> str:
    """Return a line on the products of a step's attention and on the time that they take alone, in float32."""
    multiply = torch_side.matmul(SQUARE, "float32")
    seconds = []
    multiply()
    for _ in range(rounds):
        start = time.perf_counter()
        multiply()
        torch_side.wait(None)
        seconds.append(time.perf_counter() - start)
    rate = 2 * SQUARE**3 / statistics.median(seconds)
    # Each head multiplies its query with every key, and its weights with every value.
    operations = 4 * batch * length * config.num_heads * config.head_dim
    return (
        f"products of attention: {operations / 1e9:.2f} GFLOP, {1000 * operations / rate:.2f} ms at the "
        f"{rate / 1e9:.0f} GFLOP/s of a product of squares"
    )


def programs(config: GroupedQueryAttentionConfig, length: int, batch: int = 1, dtype: str = "float32") -> str:
    """Return a line on the programs that a few steps in JAX compile, and on a step's memory relative to the cache."""
    module = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype)
    step, cache = flax_step(), module.init_cache(batch, length + ROOM)
    size = cache.key.nbytes + cache.value.nbytes
    x = jnp.ones((batch, 1, config.d_in), dtype)
    memory = step.lower(*nnx.split(module), x, cache).compile().memory_analysis()
    for _ in range(5):
        _, cache = step(*nnx.split(module), x, cache)
    share = memory.temp_size_in_bytes / size
    return f"JAX: {step._cache_size()} program for 5 steps; memory of a step {100 * share:.1f} % of the cache's"


if __name__ == "__main__":
    main()
