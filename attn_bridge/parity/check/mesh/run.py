"""Judges variants on meshes of simulated devices: each sharded module against a plain one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .... import backends
from ....sharding import Plan
from ....specs import find_variant
from ... import workers
from ...compare.driver import compare
from ...compare.sides.dtypes import LOW_PRECISIONS
from ...settings.environment import environment
from .cases import MODELS, MeshCase, mesh_cases
from .report import MeshReport, MeshRow

ROLES = ("tensor", "context", "fsdp")
"""What an axis of the mesh may stand for; the axes are called what they stand for."""

MAX_DEVICES = 16
"""Most devices that are simulated."""

FRAMEWORKS: tuple[backends.Framework, ...] = ("torch", "flax")

FAILED = "failed"
"""File in which processes that fail say why, in the order in which they do."""

_POLL = 0.2
"""Seconds between two looks at how far the processes are."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process of a mesh does.

    Attributes:
        framework: of the sharded modules.
        plain: framework of the plain ones.
        sizes: of the axes of the mesh, in order.
        method: how queries meet keys of other devices.
        variants: names of classes.
        seeds: how many times numbers are drawn.
        dtypes: precisions to judge in.
        folder: where the processes meet, and the first one says how far it is.
        rank: number of the process.
    """

    framework: backends.Framework
    plain: backends.Framework
    sizes: tuple[tuple[str, int], ...]
    method: str
    variants: tuple[str, ...]
    seeds: int
    dtypes: tuple[str, ...]
    folder: Path
    rank: int

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"process {self.rank} of the {self.framework} mesh"


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
    """Share variants out over simulated devices, and judge each against a plain module.

    JAX takes the processor for several devices, in a process of its own; torch has as many processes, which speak by
    gloo. Flax modules are compared with plain torch ones where torch is installed, so that the chain from one framework
    to the other, which ``check`` proves, goes through both.

    Args:
        sizes: size of each axis of the mesh: of ``tensor``, ``context`` and ``fsdp`` those that there are.
        variants: class names, of models too; all by default.
        method: ``all_gather``, ``ring`` or ``ulysses``.
        frameworks: ``torch``, ``flax``; those that are installed by default.
        dtypes: precisions to judge in, beside the meaning, which float64 proves; float32 by default.
        seeds: how many times numbers are drawn.
        progress: called as ``progress(what was done, done, total)``.

    Raises:
        ValueError: an axis, a size, a name or a method that is none.
        MissingBackendError: a framework is not installed.
        WorkerDiedError: a process was killed.
    """
    started = time.perf_counter()
    _check(sizes, method, seeds)
    chosen = tuple(dict.fromkeys(variants))
    cases, wanted = mesh_cases(chosen), tuple(dict.fromkeys(dtypes)) or ("float32",)
    for name in wanted:
        if name not in LOW_PRECISIONS:
            raise ValueError(f"dtype ({name!r}) must be one of {', '.join(LOW_PRECISIONS)}")
    found = _frameworks(tuple(frameworks))
    rows: list[MeshRow] = []
    total = len(cases) * len(found)
    for number, framework in enumerate(found):
        with tempfile.TemporaryDirectory() as folder:
            plain: backends.Framework = "torch" if "torch" in _installed() else framework
            task = Task(framework, plain, tuple(sizes.items()), method, chosen, seeds, wanted, Path(folder), 0)
            tasks = [dataclasses.replace(task, rank=rank) for rank in range(_processes(framework, sizes))]
            with _told(Path(folder), progress, number * len(cases), total):
                rows += _rows_of(tasks)
    return MeshReport(tuple(rows), dict(sizes), method, environment(), seeds, time.perf_counter() - started)


def _rows_of(tasks: list[Task]) -> list[MeshRow]:
    """Run the processes of a mesh, and return what the first one found; all of them find the same.

    Raises:
        ValueError: one of them failed; the message is that of the first that did.
    """
    try:
        return next(iter(list(workers.run(run_process, tasks, len(tasks), str))))
    except workers.WorkerDiedError:
        raise
    except Exception as error:  # the others may only have lost the one that failed
        place = tasks[0].folder / FAILED
        raise ValueError(place.read_text().splitlines()[0] if place.exists() else str(error)) from error


def _check(sizes: Mapping[str, int], method: str, seeds: int) -> None:
    for name, size in sizes.items():
        if name not in ROLES:
            raise ValueError(f"axis of the mesh ({name!r}) must be one of {', '.join(ROLES)}")
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1")
    devices = math.prod(sizes.values())
    if not 2 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices of the mesh ({devices}) must be 2 to {MAX_DEVICES}")
    if seeds < 1:
        raise ValueError(f"seeds ({seeds}) must be at least 1")
    Plan.of(sizes, **{name: name for name in sizes}, method=method)


def _installed() -> list[backends.Framework]:
    found = []
    for name in FRAMEWORKS:
        with contextlib.suppress(backends.MissingBackendError):
            backends.require(name, *backends.PACKAGES[name])
            found.append(name)
    return found


def _frameworks(wanted: tuple[str, ...]) -> list[backends.Framework]:
    for name in wanted:
        if name not in FRAMEWORKS:
            raise ValueError(f"framework ({name!r}) must be one of {', '.join(FRAMEWORKS)}")
    found = [name for name in FRAMEWORKS if (name in wanted if wanted else name in _installed())]
    for name in found:
        backends.require(name, *backends.PACKAGES[name])
    return found


def _processes(framework: backends.Framework, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.values()) if framework == "torch" else 1


@contextlib.contextmanager
def _told(folder: Path, progress: Callable[[str, int, int], None] | None, before: int, total: int) -> Iterator[None]:
    """Hand on how far the processes are, while the context is held."""
    if progress is None:
        yield
        return
    ended, told = threading.Event(), 0

    def tell() -> None:
        nonlocal told
        place = folder / "progress"
        lines = place.read_text().splitlines() if place.exists() else []
        for line in lines[told:]:
            told += 1
            progress(json.loads(line), before + told, total)

    def watch() -> None:
        while not ended.wait(_POLL):
            tell()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        tell()


# ---- in a process of the mesh


def run_process(task: Task) -> list[MeshRow]:
    """Judge all cases in one process of a mesh."""
    meshes = backends.load(task.framework, "_parity.meshes")
    mesh = meshes.simulate(dict(task.sizes), task.rank, task.folder)
    rows = []
    try:
        for case in mesh_cases(task.variants):
            rows.append(judge(case, task, mesh))
            if task.rank == 0:
                with (task.folder / "progress").open("a") as file:
                    file.write(json.dumps(f"{task.framework} {case.name}") + "\n")
    except Exception as error:  # it is raised again; the other processes lose this one, and fail by that
        with (task.folder / FAILED).open("a") as file:
            file.write(f"{task}: {' '.join(str(error).split())}\n")
        raise
    finally:
        meshes.leave()
    return rows


def judge(case: MeshCase, task: Task, mesh: Any) -> MeshRow:
    """Share one module out over a mesh, and compare it with a plain one."""
    started = time.perf_counter()
    parallel, meshes = (backends.load(task.framework, name) for name in ("parallel", "_parity.meshes"))
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
