"""Memory and communication per device, for each way to share a module out, counted without a clock.

python -m benchmarks.meshes [--width 512] [--tokens 1024] [--devices 4] [--long 65536] [--json FILE]

One attention and a model of two layers are shared out over simulated devices. JAX reports memory and communication of
its compiled programs; torch's collectives are counted as they run (`CommDebugMode`). The peak memory of torch's
processes is not shown: torch has no public measure of it on processors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_bridge import backends
from attn_bridge.masks import causal
from attn_bridge.specs import (
    Config,
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    RMSNormConfig,
    Rotary,
)
from attn_parity import workers
from attn_parity.sides.subject import load_adapter

from .measuring.collectives import traffic

if TYPE_CHECKING:
    import jax
    import torch
    from flax import nnx

    from jax_attn.parallel.sharding import Sharding

HEAD, HEADS, KEY_HEADS, BATCH, VOCABULARY = 64, 8, 4, 2, 4096
LONG_DEVICES, LONG_HEADS = 8, 2
STEPS = 5
"""Tokens that are decoded."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to share a module out: the sizes of the mesh's axes, named by their roles."""

    sizes: tuple[tuple[str, int], ...]
    method: str = "all_gather"

    def __str__(self) -> str:
        """Return its name in a table."""
        axes = ", ".join(f"{name}={size}" for name, size in self.sizes)
        return (f"{axes}, {self.method}" if "context" in axes else axes) or "1 device"


def ways(devices: int) -> list[Way]:
    """Return the ways to measure with this many devices."""
    all_ways = [Way(()), *(Way(((axis, devices),)) for axis in ("tensor", "fsdp"))]
    all_ways += [Way((("context", devices),), method) for method in ("all_gather", "ring", "ulysses")]
    half = devices // 2
    if half > 1 and devices % 2 == 0:
        all_ways += [Way((("tensor", half), ("fsdp", 2))), Way((("tensor", half), ("context", 2)), "ring")]
        all_ways.append(Way((("fsdp", half), ("context", 2)), "ring"))
    return all_ways


@dataclasses.dataclass(frozen=True)
class Task:
    """The measurement of one process.

    Attributes:
        framework: ``torch`` or ``flax``.
        subject: a key of `configs`, or ``long`` or ``decoding``.
        width: of the module.
        tokens: of a sequence.
        devices: of the mesh.
        folder: rendezvous of torch's processes.
        rank: number of the process.
    """

    framework: backends.Framework
    subject: str
    width: int
    tokens: int
    devices: int
    folder: Path
    rank: int = 0


def configs(width: int) -> dict[str, Config]:
    """Return the subjects to measure."""
    attention = GroupedQueryAttentionConfig(width, HEADS, KEY_HEADS, HEAD, position=Rotary(), mask=causal())
    norm = RMSNormConfig(width)
    block = DecoderBlockConfig(attention, FeedForwardConfig(width, 4 * width), norm)
    model = DecoderConfig(vocab_size=VOCABULARY, emb_dim=width, blocks=(block, block), norm=norm)
    return {"one attention": attention, "two layers": model}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="of the module")
    parser.add_argument("--tokens", type=int, default=1024, help="of each of two sequences")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--long", type=int, default=65536, help="tokens of the sequence that goes round a ring")
    parser.add_argument("--json", type=Path, help="write what was measured")
    options = parser.parse_args()
    sizes = (options.width, options.tokens, options.devices)
    measurements: dict[str, Any] = {"tables": {subject: table(subject, *sizes) for subject in configs(options.width)}}
    measurements["long"] = alone("flax", "long", options.width, options.long, LONG_DEVICES)
    measurements["decoding"] = alone("flax", "decoding", *sizes)
    size = f"{BATCH} x {options.tokens} tokens, width {options.width}, {HEADS} heads of {HEAD}, {KEY_HEADS} key heads"
    print(f"{size}, causal, float32; what one of {options.devices} devices holds and gets,")
    print(
        "forward / with the backward pass; MiB of weights and, in JAX, of temporary arrays and of what collectives give"
    )
    for subject, rows in measurements["tables"].items():
        print_table(subject, rows)
    print(f"\na ring of {LONG_DEVICES} devices, {options.long} tokens, {LONG_HEADS} heads of {HEAD}, causal, float32;")
    print("MiB of inputs, results and temporary arrays in JAX, on one device and on each of the ring")
    for direction, bytes_by_side in measurements["long"].items():
        parts = " -> ".join(f"{sum(bytes_by_side[side]) / 2**20:.1f}" for side in ("plain", "ring"))
        print(f"  {direction:16}{parts:>18}, 1/{sum(bytes_by_side['plain']) / sum(bytes_by_side['ring']):.1f}")
    print(f"decoding with tensor={options.devices}: {STEPS} steps in JAX compile {measurements['decoding']} program")
    if options.json is not None:
        options.json.write_text(json.dumps(measurements, indent=1) + "\n")


Measurement = dict[str, Any]
"""Bytes of weights on a device, and the runs forward and with the backward pass, as JSON holds them."""

HEAD_LINE = ("weights", "temporary", "collectives", "given", "torch", "JAX, forward")


def print_table(subject: str, rows: dict[str, dict[str, Measurement]]) -> None:
    """Print the measurements of a subject, forward and with the backward pass."""
    lines = [(subject, *HEAD_LINE)]
    for way, row in rows.items():
        runs = row["flax"]["runs"]
        of_torch = [sum(one.values()) for one in row["torch"]["runs"]]
        lines.append(
            (
                way,
                _mib([row["flax"]["weights"]]),
                _mib([one["temporary"] for one in runs]),
                _pair([sum(one["counts"].values()) for one in runs]),
                _mib([one["bytes"] for one in runs]),
                _pair(of_torch),
                runs[0]["words"],
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for name, *cells, words in lines:
        cells_text = "".join(f"{cell:>{width + 2}}" for cell, width in zip(cells, widths[1:], strict=False))
        print(f"{name:{widths[0]}}{cells_text}  {words}")


def _pair(values: list[object]) -> str:
    return " / ".join(map(str, values))


def _mib(sizes: list[int]) -> str:
    return _pair([f"{size / 2**20:.1f}" for size in sizes])


def table(subject: str, *sizes: int) -> dict[str, dict[str, Measurement]]:
    """Return way -> framework -> measurements.

    Raises:
        SystemExit: the frameworks put other weights on a device.
    """
    tables = {framework: alone(framework, subject, *sizes) for framework in ("flax", "torch")}
    for way, row in tables["flax"].items():
        if tables["torch"][way]["weights"] != row["weights"]:
            raise SystemExit(
                f"error: {way}: a device holds {row['weights']} bytes of weights in JAX, and other in torch"
            )
    return {way: {framework: rows[way] for framework, rows in tables.items()} for way in tables["flax"]}


def alone(framework: str, subject: str, width: int, tokens: int, devices: int) -> Any:
    """Run one measurement in separate processes, and return the result of the first one."""
    from benchmarks import meshes  # run as a command, this module has another name in the processes

    with tempfile.TemporaryDirectory() as folder:
        count = devices if framework == "torch" else 1
        first = meshes.Task(framework, subject, width, tokens, devices, Path(folder))
        tasks = [dataclasses.replace(first, rank=rank) for rank in range(count)]
        return next(
            iter(list(workers.run(meshes.run, tasks, count, lambda task: f"{task.framework}, process {task.rank}")))
        )


# ---- in a process


def run(task: Task) -> object:
    """Measure in one process."""
    if task.subject == "long":
        return long_ring(task)
    if task.subject == "decoding":
        return decoding(task)
    of_way = jax_row if task.framework == "flax" else torch_row
    tokens = task.tokens
    shape = (BATCH, tokens, task.width) if task.subject == "one attention" else (BATCH, tokens)
    random = np.random.default_rng(0)
    x = random.normal(size=shape).astype(np.float32) if len(shape) == 3 else random.integers(0, VOCABULARY, shape)
    x = x.astype(np.float32 if len(shape) == 3 else np.int32)
    meshes = load_adapter(task.framework, "meshes")
    measurements = {}
    try:
        for number, way in enumerate(ways(task.devices)):
            # torch's processes meet for the first mesh, also where its module stays on one device
            sizes = dict(way.sizes) or {"alone": task.devices}
            mesh = meshes.simulate(sizes, task.rank, task.folder, again=number > 0)
            module = build(task, configs(task.width)[task.subject])
            if way.sizes:
                axes = {name: name for name in sizes}
                module = backends.load(task.framework, "parallel").parallelize(module, mesh, **axes, method=way.method)
            measurements[str(way)] = of_way(module, x)
    finally:
        meshes.leave()
    return measurements


def build(task: Task, config: Config) -> nnx.Module | torch.nn.Module:
    """Return the plain module."""
    name = "DecoderModel" if isinstance(config, DecoderConfig) else "GroupedQueryAttention"
    if task.framework == "torch":
        import torch

        import torch_attn

        torch.manual_seed(0)
        return getattr(torch_attn, name)(config)
    from flax import nnx

    import jax_attn

    return getattr(jax_attn, name)(config, rngs=nnx.Rngs(0))


def jax_row(module: nnx.Module, x: np.ndarray) -> Measurement:
    """Return a device's bytes of weights, and its memory and traffic forward and with the backward pass."""
    import jax
    from flax import nnx

    graph, weights = nnx.split(module)

    def forward(weights: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights)(x)

    def both(weights: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        return jax.value_and_grad(lambda weights: (forward(weights, x) ** 2).mean())(weights)

    runs = []
    for function in (forward, both):
        compiled = jax.jit(function).lower(weights, x).compile()
        sent = traffic(compiled.as_text() or "")
        num_bytes = compiled.memory_analysis().temp_size_in_bytes
        runs.append({"temporary": num_bytes, "counts": dict(sent.counts), "bytes": sent.bytes, "words": sent.words})
    num_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(weights))
    return {"weights": num_bytes, "runs": runs}


def torch_row(module: torch.nn.Module, x: np.ndarray) -> Measurement:
    """Return a device's bytes of weights, and the collectives forward and with the backward pass."""
    from torch.distributed.tensor import DTensor

    from attn_parity.frameworks.torch import meshes

    num_bytes = sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in module.parameters())
    name = "tokens" if x.ndim == 2 else "x"
    runs = [meshes.collectives(module, {name: x}, backward=backward) for backward in (False, True)]
    return {"weights": num_bytes, "runs": runs}


def long_ring(task: Task) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return direction -> plain or ring -> bytes that a device holds of inputs, results and temporary arrays."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from attn_bridge.sharding import ShardingPlan
    from jax_attn.functional import dot_product_attention
    from jax_attn.parallel.sharding import Sharding

    mesh = load_adapter("flax", "meshes").simulate({"context": task.devices}, 0, task.folder)
    ring = Sharding(mesh, ShardingPlan.of({"context": task.devices}, context="context", method="ring"))

    def held(sharding: Sharding | None, differentiated: bool) -> tuple[int, int, int]:
        def forward(*operands: jax.Array) -> jax.Array:
            return dot_product_attention(*operands, mask=causal(), sharding=sharding)

        def both(cotangent: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
            return jax.vjp(forward, *operands)[1](cotangent)

        placement = (
            NamedSharding(mesh, PartitionSpec(None, "context"))
            if sharding
            else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        operand = jax.ShapeDtypeStruct((1, task.tokens, LONG_HEADS, HEAD), jnp.float32, sharding=placement)
        function: Callable[..., object] = both if differentiated else forward
        compiled = jax.jit(function, out_shardings=placement).lower(*[operand] * (4 if differentiated else 3)).compile()
        memory = compiled.memory_analysis()
        return memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes

    return {
        name: {"plain": held(None, differentiated), "ring": held(ring, differentiated)}
        for name, differentiated in (("forward", False), ("and backward", True))
    }


def decoding(task: Task) -> int:
    """Return how many programs a few steps of decoding compile, with heads shared out."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_attn.parallel import parallelize

    mesh = load_adapter("flax", "meshes").simulate({"tensor": task.devices}, 0, task.folder)
    model = parallelize(build(task, configs(task.width)["two layers"]), mesh, tensor="tensor")
    step = jax.jit(
        lambda graph, weights, tokens, cache: nnx.merge(graph, weights)(tokens, cache=cache),
        static_argnums=0,
        donate_argnums=3,
    )
    cache = model.init_cache(BATCH, STEPS)
    tokens = jax.device_put(jnp.ones((BATCH, 1), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    for _ in range(STEPS):
        logits, cache = step(*nnx.split(model), tokens, cache)
        tokens = logits.argmax(-1)
    return step._cache_size()


if __name__ == "__main__":
    main()
