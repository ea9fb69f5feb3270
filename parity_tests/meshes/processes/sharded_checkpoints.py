"""Distributed checkpoints of torch: state dicts that the processes of a mesh save and load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_parity.sides.subject import load_adapter

from ...support.processes import crew

SHAPES = {"rows.weight": (7, 5), "grid.weight": (8, 6), "few.weight": (2, 3), "cube.weight": (4, 5, 6), "bias": (9,)}
"""Name -> shape: sizes that don't divide by the devices, fewer rows than devices, three axes."""


MESHES = {"one axis": {"model": 4}, "two axes": {"data": 2, "model": 2}}


@dataclasses.dataclass(frozen=True)
class Task:
    """One process: where they meet, its number, where each mesh saves to, and the checkpoint that all load."""

    folder: Path
    rank: int
    saved: Path
    loaded: Path


def run(saved: Path, loaded: Path) -> list[dict[str, bool]]:
    """Save `values` from each mesh to a folder of its name, load a checkpoint, and return which found it right."""
    return crew.on_a_mesh(save_and_load, 4, lambda folder, rank: Task(folder, rank, saved, loaded))


def values() -> dict[str, Any]:
    """Return the whole tensors."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return found | {"grid.weight": found["grid.weight"].to(torch.bfloat16), "step": torch.tensor(3)}


def save_and_load(task: Task) -> dict[str, bool]:
    """Save the tensors cut along the axes of each mesh, then load and compare them."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    meshes = load_adapter("torch", "meshes")
    whole, right = values(), {}
    for kind, sizes in MESHES.items():
        mesh = meshes.simulate(sizes, task.rank, task.folder, again=bool(right))

        def cut(name: str, tensor: Any, mesh: Any = mesh) -> Any:
            if name == "step":
                return tensor
            last = Shard(tensor.ndim - 1)
            placements: Mapping[str, Any] = {"cube.weight": [Shard(1), last], "bias": [Shard(0), Replicate()]}
            return distribute_tensor(tensor, mesh, placements.get(name, [Shard(0), last])[: mesh.ndim])

        state = {name: cut(name, tensor) for name, tensor in whole.items()} | {"lr": 0.5}
        writer = dcp.FileSystemWriter(task.saved / kind, single_file_per_rank=kind == "one axis")
        dcp.save(state, storage_writer=writer)
        state = {name: cut(name, torch.zeros_like(tensor)) for name, tensor in whole.items()}
        dcp.load(state, checkpoint_id=task.loaded)
        full = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
        right[kind] = all(torch.equal(full[name], tensor) for name, tensor in whole.items())
    meshes.leave()
    return right
