"""Tokens that sharded models generate, and logits of tokens that come one by one, next to the plain model's."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_parity import workers
from attn_parity.check.mesh.cases import mesh_cases
from attn_parity.check.mesh.run import build
from attn_parity.sides.subject import load_adapter

from ...support.processes import crew

PROMPT, NEW = 5, 6


@dataclasses.dataclass(frozen=True)
class Task:
    """One process: framework, axes of the mesh, names of cases, where the processes meet, number."""

    framework: backends.Framework
    sizes: tuple[tuple[str, int], ...]
    cases: tuple[str, ...]
    folder: Path
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Generated:
    """What one model gave: tokens of the plain and of the sharded one, and how far apart cached logits are at most."""

    plain: list[list[int]]
    sharded: list[list[int]]
    apart: float


def generated(framework: backends.Framework, sizes: dict[str, int], cases: list[str]) -> list[dict[str, Generated]]:
    """Return what each process found, by case."""
    devices = int(np.prod(list(sizes.values())))
    if framework == "torch":
        return crew.on_a_mesh(
            run, devices, lambda folder, rank: Task("torch", tuple(sizes.items()), tuple(cases), folder, rank)
        )
    with tempfile.TemporaryDirectory() as folder:
        return list(workers.run(run, [Task("flax", tuple(sizes.items()), tuple(cases), Path(folder))], 1))


def run(task: Task) -> dict[str, Generated]:
    """Generate in one process of a mesh."""
    parallel, meshes = backends.load(task.framework, "parallel"), load_adapter(task.framework, "meshes")
    mesh = meshes.simulate(dict(task.sizes), task.rank, task.folder)
    found = {}
    try:
        with meshes.double_precision():
            for case in mesh_cases():
                if case.name in task.cases:
                    plain, sharded = (build(task.framework, case, "float64") for _ in range(2))
                    parallel.parallelize(sharded, mesh, **{name: name for name, _ in task.sizes}, method="ring")
                    found[case.name] = _compared(task.framework, plain, sharded, case.numbers.inputs["tokens"])
    finally:
        meshes.leave()
    return found


def _compared(framework: backends.Framework, plain: Any, sharded: Any, ids: np.ndarray) -> Generated:
    backend = backends.load(framework)
    tokens = backend.from_numpy(ids[:, : PROMPT + NEW].astype("int32"))
    prompt = tokens[:, :PROMPT]
    told = [backend.to_numpy(model.generate(prompt, NEW)).tolist() for model in (plain, sharded)]
    whole = backend.to_numpy(plain(tokens))
    cache, logits = sharded.init_cache(len(ids), PROMPT + NEW), []
    for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + NEW))]:
        part, cache = sharded(tokens[:, start:stop], cache=cache)
        logits.append(backend.to_numpy(part))
    return Generated(*told, float(np.abs(np.concatenate(logits, 1) - whole).max()))
