"""Files of each rank: the state dicts with its own parts of the tensors that processes save by ``torch.save``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from attn_parity.sides.subject import load_adapter

from ...support.processes import crew

MESHES: dict[str, dict[str, int]] = {
    "two": {"data": 2},
    "three": {"data": 3},
    "grid": {"data": 2, "model": 2},
}
"""Name -> sizes of the mesh."""

SHAPES = {"rows": (7, 5), "columns": (7, 5), "both": (5, 7), "one": (1,), "few": (2, 3), "long": (9,)}
"""Name -> shape: sizes that don't divide by the ranks, and fewer rows than ranks."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One process: where they meet, its number, the mesh, and the folder to save to."""

    folder: Path
    rank: int
    mesh: str
    saved: Path


def run(saved: Path) -> None:
    """Save the files of each mesh to a folder of its name, and whole state dicts next to them."""
    for name, sizes in MESHES.items():
        devices = 4 if len(sizes) > 1 else sizes["data"]
        crew.on_a_mesh(save, devices, lambda folder, rank, name=name: Task(folder, rank, name, saved))  # type: ignore[misc]


def save(task: Task) -> None:
    """Save tensors in shards and replicas, and a model that FSDP2 (and tensor parallelism) has cut."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    meshes = load_adapter("torch", "meshes")
    mesh = meshes.simulate(MESHES[task.mesh], task.rank, task.folder)
    folder = task.saved / task.mesh
    for kind in ("tensors", "model"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    whole["few"] = whole["few"].bfloat16()
    placements: dict[str, list[Any]] = {
        "columns": [Shard(1), Shard(0)],
        "both": [Shard(0), Shard(0)],
        "long": [Replicate(), Shard(0)],
    }
    cut = {
        name: distribute_tensor(tensor, mesh, placements.get(name, [Shard(0), Replicate()])[: mesh.ndim])
        for name, tensor in whole.items()
    }
    torch.save({"state": {**cut, "plain": whole["rows"]}, "step": 3}, folder / "tensors" / f"rank{task.rank}_step_7.pt")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 3), torch.nn.LayerNorm(3))
    if task.rank == 0:
        expected = {f"state.{name}": tensor for name, tensor in (*whole.items(), ("plain", whole["rows"]))}
        torch.save(expected, folder / "tensors.pt")
        torch.save(model.state_dict(), folder / "model.pt")
    if mesh.ndim > 1:
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    name = f"model_world_size_{mesh.size()}_rank_{task.rank}.pt"
    torch.save(dict(model.named_parameters()), folder / "model" / name)
    torch.save({"seed": 1}, folder / "model" / name.replace("model", "extra_state"))
    meshes.leave()
