"""Judges variants on meshes of simulated devices: each sharded module against a plain one."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attn_bridge import backends
from attn_bridge.specs import find_variant

from ...compare.driver import compare
from ...samples.limits import MAX_SEEDS
from ...settings.precision import environment
from ...sides.arrays import LOW_PRECISIONS
from ...sides.subject import load_adapter
from .cases import MODELS, MeshCase, mesh_cases
from .processes import (
    MeshTask,
    check_mesh_sizes,
    chosen_frameworks,
    installed,
    joined,
    process_count,
    results_of,
    tell_done,
    told,
)
from .report import MeshReport, MeshRow


@dataclasses.dataclass(frozen=True)
class CheckTask(MeshTask):
    """The modules that one process of a mesh judges.

    Attributes:
        method: how queries meet keys of other devices.
        variants: names of classes.
        seeds: number of draws.
        dtypes: precisions to judge in.
    """

    method: str
    variants: tuple[str, ...]
    seeds: int
    dtypes: tuple[str, ...]


def check_mesh(
    sizes: Mapping[str, int],
    variants: Iterable[str] = (),
    *,
    method: str = "all_gather",
    frameworks: Iterable[str] = (),
    dtypes: Iterable[str] = (),
    seeds: int = 2,
    progress: Callable[[str, int, int], None] | None = None,
) -> MeshReport:
    """Shard variants over simulated devices, and judge each against a plain module.

    JAX simulates the devices on the CPU, in a separate process; torch uses a process per device, connected by gloo.
    Flax modules are compared with plain torch ones where torch is installed, so that the chain from one framework to
    the other, which ``check`` proves, goes through both.

    Args:
        sizes: size of each axis of the mesh: any of ``tensor``, ``context`` and ``fsdp``.
        variants: class names, of models too; all by default.
        method: ``all_gather``, ``ring`` or ``ulysses``.
        frameworks: ``torch``, ``flax``; those that are installed by default.
        dtypes: precisions to judge in, in addition to float64; float32 by default.
        seeds: number of draws.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        ValueError: an axis, a size, a name or a method is invalid.
        MissingBackendError: a framework is not installed.
        WorkerDiedError: a process was killed.
    """
    started = time.perf_counter()
    check_mesh_sizes(sizes, method)
    if seeds < 1:
        raise ValueError(f"seeds ({seeds}) must be at least 1")
    if seeds > MAX_SEEDS:
        raise ValueError(f"seeds ({seeds}) must be at most {MAX_SEEDS}")
    chosen = tuple(dict.fromkeys(variants))
    cases, wanted = mesh_cases(chosen), tuple(dict.fromkeys(dtypes)) or ("float32",)
    for name in wanted:
        if name not in LOW_PRECISIONS:
            raise ValueError(f"dtype ({name!r}) must be one of {', '.join(LOW_PRECISIONS)}")
    chosen_names = chosen_frameworks(tuple(frameworks))
    rows: list[MeshRow] = []
    total = len(cases) * len(chosen_names)
    for number, framework in enumerate(chosen_names):
        with tempfile.TemporaryDirectory() as folder:
            plain: backends.Framework = "torch" if "torch" in installed() else framework
            process = (framework, plain, tuple(sizes.items()), Path(folder), 0)
            task = CheckTask(*process, method, chosen, seeds, wanted)
            tasks = [dataclasses.replace(task, rank=rank) for rank in range(process_count(framework, sizes))]
            with told(Path(folder), progress, number * len(cases), total):
                rows += results_of(run_process, tasks)
    return MeshReport(tuple(rows), dict(sizes), method, environment(), seeds, time.perf_counter() - started)


# ---- in a process of the mesh


def run_process(task: CheckTask) -> list[MeshRow]:
    """Judge all cases in one process of a mesh."""
    rows = []
    with joined(task) as mesh:
        for case in mesh_cases(task.variants):
            rows.append(judge(case, task, mesh))
            tell_done(task, f"{task.framework} {case.name}")
    return rows


def judge(case: MeshCase, task: CheckTask, mesh: object) -> MeshRow:
    """Share one module out over a mesh, and compare it with a plain one."""
    started = time.perf_counter()
    parallel, meshes = backends.load(task.framework, "parallel"), load_adapter(task.framework, "meshes")
    sharded = build(task.framework, case)
    roles = {name: name for name, _ in task.sizes}
    row = MeshRow(case.name, task.framework, "refused")
    try:
        sharded = parallel.parallelize(sharded, mesh, **roles, method=task.method)
    except ValueError as error:
        return dataclasses.replace(row, message=str(error), seconds=time.perf_counter() - started)
    inputs = case.inputs("float32")
    report = compare(build(task.plain, case), sharded, inputs, seeds=task.seeds, dtypes=task.dtypes)
    worst = max((one.relative or 0.0 for one in report.tensors), default=0.0)
    different = [one for one in report.tensors if one.verdict != "equal"]
    lines = [f"{one.name}: {one.message}" for one in different]
    first = report.first_divergence
    return dataclasses.replace(
        row,
        verdict=report.verdict,
        largest=worst,
        collectives=meshes.collectives(sharded, inputs, backward=False),
        step=meshes.collectives(sharded, inputs, backward=True),
        message=" | ".join(filter(None, [report.message, f"first divergence: {first}" if first else "", *lines])),
        seconds=time.perf_counter() - started,
    )


def build(framework: backends.Framework, case: MeshCase, dtype: str = "float32") -> Any:
    """Return the plain module of a case, with its weights."""
    backend = backends.load(framework)
    if case.class_name in {name.split()[0] for name in MODELS}:
        module = backend.build_blank(case.class_name, case.config, dtype)
    else:
        module = backend.build(find_variant(case.class_name), case.arguments, dtype)
    weights = {name: array.astype(dtype) for name, array in case.numbers.weights.items()}
    backend.set_weights(module, weights if framework == "torch" else case.config.rules().convert(weights, "torch"))
    return module
