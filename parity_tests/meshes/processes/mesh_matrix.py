"""Sharded modules against plain ones in float64: every output and gradient, over meshes, methods and variants.

``python -m parity_tests.meshes.processes.mesh_matrix --framework flax --mesh tensor=2,context=4 --method ring`` runs
the cases of ``attn-bridge check --mesh`` without the judge: one call each, and the largest difference of each tensor,
as a part of its largest value or of 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import backends
from attn_parity import workers
from attn_parity.check.mesh.cases import MeshCase, mesh_cases
from attn_parity.check.mesh.run import build
from attn_parity.commands.check import parse_mesh
from attn_parity.sides.subject import load_adapter

from ...support.processes import crew

Sizes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """What the processes of a mesh run, one mesh after the other within the devices that there are.

    Attributes:
        framework: ``torch`` or ``flax``.
        devices: how many there are.
        meshes: sizes of the axes of each mesh, whose product is `devices`.
        methods: how queries meet keys.
        cases: names of cases; all for none.
        folder: where the processes meet.
        rank: number of the process.
    """

    framework: backends.Framework
    devices: int
    meshes: tuple[Sizes, ...]
    methods: tuple[str, ...]
    cases: tuple[str, ...]
    folder: Path
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Deviation:
    """One case on one mesh: the largest difference and the tensor that has it, or why it was refused."""

    case: str
    mesh: Sizes
    method: str
    largest: float | None = None
    tensor: str = ""
    refused: str = ""


def run(framework: backends.Framework, meshes: list[Sizes], methods: list[str], cases: list[str]) -> list[Deviation]:
    """Run cases on meshes, those of equally many devices in the same processes."""
    # Run as a command, this module has another name in the processes.
    from parity_tests.meshes.processes import mesh_matrix

    found: list[Deviation] = []
    by_devices = itertools.groupby(sorted(meshes, key=_devices), key=_devices)
    for devices, some in by_devices:
        with tempfile.TemporaryDirectory() as folder:
            batch = mesh_matrix.Batch(framework, devices, tuple(some), tuple(methods), tuple(cases), Path(folder))
            if framework == "torch":
                batches = [dataclasses.replace(batch, rank=rank) for rank in range(devices)]
                found += crew.run(mesh_matrix.run_batch, batches)[0]
            else:
                found += next(workers.run(mesh_matrix.run_batch, [batch], 1))
    return found


def run_batch(batch: Batch) -> list[Deviation]:
    """Run everything in one process of the meshes."""
    meshes = load_adapter(batch.framework, "meshes")
    found = []
    try:
        with meshes.double_precision():
            for number, sizes in enumerate(batch.meshes):
                mesh = meshes.simulate(dict(sizes), batch.rank, batch.folder, again=number > 0)
                for case in mesh_cases():
                    if not batch.cases or case.name in batch.cases or case.class_name in batch.cases:
                        found += [deviation(batch.framework, case, mesh, sizes, method) for method in batch.methods]
    finally:
        meshes.leave()
    return found


def deviation(framework: backends.Framework, case: MeshCase, mesh: Any, sizes: Sizes, method: str) -> Deviation:
    """Run one case on one mesh, and compare it with the plain module."""
    parallel, meshes = backends.load(framework, "parallel"), load_adapter(framework, "meshes")
    plain, sharded = (build(framework, case, "float64") for _ in range(2))
    try:
        sharded = parallel.parallelize(sharded, mesh, **{name: name for name, _ in sizes}, method=method)
    except ValueError as error:
        return Deviation(case.name, sizes, method, refused=str(error))
    inputs = case.inputs("float64")
    ours, theirs = (meshes.results(module, inputs, seed=1) for module in (sharded, plain))
    largest, tensor = 0.0, ""
    for name, wanted in theirs.items():
        apart = float(np.abs(ours[name] - wanted).max(initial=0.0)) / max(1.0, float(np.abs(wanted).max(initial=0.0)))
        if not apart <= largest:
            largest, tensor = apart, name
    return Deviation(case.name, sizes, method, largest, tensor)


def _devices(sizes: Sizes) -> int:
    return math.prod(size for _, size in sizes)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.meshes.processes.mesh_matrix", description=__doc__)
    parser.add_argument("--framework", action="append", choices=["torch", "flax"])
    parser.add_argument("--mesh", action="append", required=True, help="axes, such as tensor=2,context=4")
    parser.add_argument("--method", action="append", choices=["all_gather", "ring", "ulysses"])
    parser.add_argument("--case", action="append", default=[], help="a class, or one of its examples")
    parser.add_argument("--limit", type=float, default=1e-12)
    parser.add_argument("--json", type=Path, help="append a line for each case to this file")
    options = parser.parse_args()
    failed = 0
    for framework in options.framework or ["torch", "flax"]:
        started = time.perf_counter()
        meshes = [tuple(parse_mesh(text).items()) for text in options.mesh]
        found = run(framework, meshes, options.method or ["all_gather", "ring", "ulysses"], options.case)
        ran = [one for one in found if not one.refused]
        wrong = [one for one in ran if one.largest is None or not one.largest <= options.limit]
        for one in wrong:
            axes = ",".join(f"{name}={size}" for name, size in one.mesh)
            print(f"{framework} {one.case} on {axes} by {one.method}: {one.tensor} differs by {one.largest:.2g}")
        if options.json is not None:
            with options.json.open("a") as file:
                file.writelines(json.dumps({"framework": framework, **dataclasses.asdict(one)}) + "\n" for one in found)
        largest = max((one.largest or 0.0 for one in ran), default=0.0)
        print(
            f"{framework}: {len(ran) - len(wrong)} of {len(ran)} within {options.limit:g}, largest {largest:.1e}, "
            f"{len(found) - len(ran)} refused, {time.perf_counter() - started:.0f} s"
        )
        failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
