"""Sharded attention as other people write it, with torch's and JAX's own means, and what the judge says of it.

Each function runs in the processes of a mesh: in torch one for each device, in JAX one for all.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import backends, parity
from attn_parity import workers
from attn_parity.sides.subject import load_adapter

from ...support.processes import crew

WIDTH, HEADS, HEAD_DIM = 12, 4, 4


@dataclasses.dataclass(frozen=True)
class Task:
    """One process: the framework, where the processes meet, its number, and the fault that is planted."""

    framework: backends.Framework
    folder: Path
    rank: int
    fault: str


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the judge said: verdict, place of the fault, and for each tensor that differs, on which shards."""

    verdict: str
    first: str
    shards: dict[str, str]
    messages: dict[str, str]


def judged(framework: backends.Framework, fault: str) -> list[Judged]:
    """Compare the plain module with the sharded one, and return what each process was told."""
    if framework == "torch":
        return crew.on_a_mesh(judge_torch, 4, lambda folder, rank: Task("torch", folder, rank, fault))
    with tempfile.TemporaryDirectory() as folder:
        return list(workers.run(judge_flax, [Task("flax", Path(folder), 0, fault)], 1))


def _said(plain: Any, sharded: Any) -> Judged:
    x = np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype("float32")
    report = parity.compare(plain, sharded, x, seeds=2)
    different = [one for one in report.tensors if one.verdict == "different"]
    first = report.first_divergence
    return Judged(
        report.verdict,
        "" if first is None else str(first),
        {one.name: one.shards for one in different},
        {one.name: one.message for one in different},
    )


def judge_flax(task: Task) -> Judged:
    """Compare attention over a mesh by `jax.shard_map` with plain attention."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = load_adapter("flax", "meshes").simulate({"rows": 2, "model": 2}, 0, task.folder)

    class Attention(nnx.Module):
        def __init__(self, *, sharded: bool):
            rngs = nnx.Rngs(0)
            self.q, self.k, self.v = (nnx.Linear(WIDTH, HEADS * HEAD_DIM, rngs=rngs) for _ in range(3))
            self.o = nnx.Linear(HEADS * HEAD_DIM, WIDTH, rngs=rngs)
            self.sharded = sharded

        def __call__(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            q, k, v = (layer(x).reshape(batch, tokens, HEADS, HEAD_DIM) for layer in (self.q, self.k, self.v))
            if self.sharded:
                cut = P(None, "rows", "model")
                core = jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=cut)
                out = core(q, k, v)
            else:
                out = attend(q, k, v, 0)
            return self.o(out.reshape(batch, tokens, -1))

    def attend(q: Any, k: Any, v: Any, start: Any) -> Any:
        scores = jnp.einsum("bthc,bshc->bhts", q, k) / 2.0
        seen = (start + jnp.arange(q.shape[1]))[:, None] >= jnp.arange(k.shape[1])
        return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)

    def local(q: Any, k: Any, v: Any) -> Any:
        k, v = (jax.lax.all_gather(one, "rows", axis=1, tiled=True) for one in (k, v))
        start = jax.lax.axis_index("rows") * q.shape[1]
        if task.fault == "mask on one shard":
            is_there = (jax.lax.axis_index("rows") == 1) & (jax.lax.axis_index("model") == 1)
            start = start - jnp.where(is_there, 1, 0)
        if task.fault == "positions counted locally":
            start = 0
        return attend(q, k, v, start)

    plain, sharded = Attention(sharded=False), Attention(sharded=True)
    for name in "qkv":
        layer = getattr(sharded, name)
        layer.kernel.set_value(jax.device_put(layer.kernel[...], NamedSharding(mesh, P(None, "model"))))
        layer.bias.set_value(jax.device_put(layer.bias[...], NamedSharding(mesh, P("model"))))
    sharded.o.kernel.set_value(jax.device_put(sharded.o.kernel[...], NamedSharding(mesh, P("model", None))))
    return _said(plain, sharded)


def refused(wrapper: str) -> list[str]:
    """Return what each process is told of a module that torch's wrappers share out."""
    return crew.on_a_mesh(refuse, 2, lambda folder, rank: Task("torch", folder, rank, wrapper))


def refuse(task: Task) -> str:
    """Compare a plain module with one that a wrapper of torch shares out."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    meshes = load_adapter("torch", "meshes")
    meshes.simulate({"data": 2}, task.rank, task.folder)
    plain, inner = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    wrapped = DistributedDataParallel(inner) if task.fault == "DDP" else inner
    if task.fault == "fully_shard":
        fully_shard(inner[1])
    try:
        parity.compare(plain, wrapped, torch.randn(2, 4))
    except ValueError as error:
        return str(error)
    finally:
        meshes.leave()
    return ""


def judge_torch(task: Task) -> Judged:
    """Compare attention over a mesh by torch's own `parallelize_module` with plain attention."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    meshes = load_adapter("torch", "meshes")
    mesh = meshes.simulate({"model": 4}, task.rank, task.folder)

    class Attention(nn.Module):
        def __init__(self, fault: str = "") -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD_DIM) for _ in range(3))
            self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH)
            self.fault = fault

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            heads = (layer(x).view(batch, tokens, -1, HEAD_DIM).transpose(1, 2) for layer in (self.q, self.k, self.v))
            out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            if self.fault == "scale on one shard" and task.rank == 2:
                out = out * 1.01
            result = self.o(out.transpose(1, 2).reshape(batch, tokens, -1))
            if self.fault == "copies differ":
                part = result if task.rank != 3 else result * 1.5
                result = DTensor.from_local(part, mesh, [Replicate()], run_check=False)
            return result

    torch.manual_seed(0)
    plain, sharded = Attention(), Attention(task.fault)
    styles = {**dict.fromkeys("qkv", ColwiseParallel()), "o": RowwiseParallel()}
    parallelize_module(sharded, mesh, styles)
    if task.fault == "bias on every device":
        sharded.o.register_forward_hook(lambda layer, _, out: out + 3 * layer.bias.to_local())
    try:
        return _said(plain, sharded)
    finally:
        meshes.leave()


def tables_moved() -> list[tuple[float, float]]:
    """Return what each process finds of a sharded module with a table: its output's error, and how far it moves."""
    return crew.on_a_mesh(move_tables, 2, lambda folder, rank: Task("torch", folder, rank, ""))


def move_tables(task: Task) -> tuple[float, float]:
    """Run a plain and a sharded module of torch with the numbers of their table moved by a float32 unit."""
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from attn_parity.sides.subject import Arguments

    meshes = load_adapter("torch", "meshes")
    mesh = meshes.simulate({"model": 2}, task.rank, task.folder)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
            self.table = torch.linspace(0.1, 0.9, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.down(torch.tanh(self.up(x * self.table)))

    torch.manual_seed(0)
    plain, sharded = Scaled(), Scaled()
    parallelize_module(sharded, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    subject_of = load_adapter("torch").TorchSubject
    weights = subject_of(plain).weights()
    call = Arguments((np.random.default_rng(0).normal(size=(2, 8, WIDTH)),), {})
    try:
        moved, wanted = (
            subject_of(one).run(weights, call, mode="tables", seed=1).outputs[0] for one in (sharded, plain)
        )
        still = subject_of(plain).run(weights, call, dtype="float64").outputs[0]
    finally:
        meshes.leave()
    return float(np.abs(moved - wanted).max()), float(np.abs(moved - still).max())
