"""Counts the collectives of sharded modules, in the processes of a mesh."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from attn_bridge import backends
from attn_parity import workers
from attn_parity.check.mesh.cases import mesh_cases
from attn_parity.check.mesh.run import build
from attn_parity.sides.subject import load_adapter

from ...support.processes import crew


@dataclasses.dataclass(frozen=True)
class Task:
    """One process: framework, axes, method, name of the case, where the processes meet, number."""

    framework: backends.Framework
    sizes: tuple[tuple[str, int], ...]
    method: str
    case: str
    folder: Path
    rank: int = 0


def counts(framework: backends.Framework, sizes: dict[str, int], method: str, case: str) -> dict[str, int]:
    """Return how often each collective operation runs in a forward pass, by one word for both frameworks."""
    devices = 1
    for size in sizes.values():
        devices *= size
    if framework == "torch":
        return crew.on_a_mesh(
            count, devices, lambda folder, rank: Task("torch", tuple(sizes.items()), method, case, folder, rank)
        )[0]
    with tempfile.TemporaryDirectory() as folder:
        return next(workers.run(count, [Task("flax", tuple(sizes.items()), method, case, Path(folder))], 1))


def count(task: Task) -> dict[str, int]:
    """Count in one process."""
    parallel, meshes = backends.load(task.framework, "parallel"), load_adapter(task.framework, "meshes")
    mesh = meshes.simulate(dict(task.sizes), task.rank, task.folder)
    try:
        (case,) = (one for one in mesh_cases() if one.name == task.case)
        roles = {name: name for name, _ in task.sizes}
        module = parallel.parallelize(build(task.framework, case), mesh, **roles, method=task.method)
        found: dict[str, int] = meshes.collectives(module, case.inputs("float32"), backward=False)
    finally:
        meshes.leave()
    return {_WORDS.get(name, name): number for name, number in found.items()}


_WORDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}
"""Word of torch -> that of XLA."""
