"""How good the judge is on many devices: distributed faults that it must find, right pairs it must not object to."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .... import backends
from ....backends import Framework
from ...check.mesh.processes import (
    check_mesh_sizes,
    chosen_frameworks,
    installed,
    joined,
    process_count,
    results_of,
    tell_done,
    told,
)
from ...settings.environment import environment
from ..mutants import FIRST_SEED, find_seed
from .configs import draw_mesh_config
from .faults import MESH_FAULTS, MeshFault, find_mesh_fault
from .report import MeshMutationReport
from .trials import MeshResult, MeshTrial, run_trial

CONFIGS = 10
"""Right pairs of each framework that are judged by default."""

FAULT_SEEDS = 100_000
"""Faults are planted into configurations from this many seeds after the right pairs."""

PROGRAMS_OF = 8
"""Trials whose compiled programs a process keeps."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process of a mesh does.

    Attributes:
        framework: of the sharded side.
        plain: framework of the plain side.
        sizes: of the axes of the mesh, in order.
        trials: what is judged.
        folder: where the processes meet.
        rank: number of the process.
    """

    framework: Framework
    plain: Framework
    sizes: tuple[tuple[str, int], ...]
    trials: tuple[MeshTrial, ...]
    folder: Path
    rank: int

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"process {self.rank} of the {self.framework} mesh"


def mutate_mesh(
    sizes: Mapping[str, int],
    configs: int = CONFIGS,
    faults: Iterable[str] | None = None,
    seed: int = FIRST_SEED,
    *,
    plants: int = 1,
    frameworks: Iterable[str] = (),
    progress: Progress | None = None,
) -> MeshMutationReport:
    """Measure how many distributed faults `compare` finds and names, and how many right sharded pairs it objects to.

    Faults are planted into a block that is written for many devices by hand. Right pairs are that block, and our own
    modules that `parallelize` shares out, drawn in shape, masks, method and precision. The other side is plain.

    Args:
        sizes: size of each axis of the mesh: of ``tensor``, ``context`` and ``fsdp`` those that there are.
        configs: number of right pairs of each framework.
        faults: names of faults; None is all. Those that no configuration of this mesh can have are left out.
        seed: where seeds begin.
        plants: how many times each fault is planted in each framework.
        frameworks: ``torch``, ``flax``; those that are installed by default.
        progress: called with what is done, how much of it, and how much there is.

    Raises:
        ValueError: an axis, a size, a name or a number that is none.
        MissingBackendError: a framework is not installed.
        WorkerDiedError: a process was killed.
    """
    started = time.perf_counter()
    check_mesh_sizes(sizes)
    for name, value, least in (("configs", configs, 0), ("plants", plants, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} ({value}) must be at least {least}")
    wanted = MESH_FAULTS if faults is None else tuple(map(find_mesh_fault, faults))
    found: list[MeshResult] = []
    chosen = chosen_frameworks(tuple(frameworks))
    planned = {one: plan_trials(one, sizes, configs, wanted, seed, plants) for one in chosen}
    total = sum(map(len, planned.values()))
    for framework, trials in planned.items():
        if not trials:
            continue
        with tempfile.TemporaryDirectory() as folder:
            plain: Framework = "torch" if "torch" in installed() else framework
            task = Task(framework, plain, tuple(sizes.items()), tuple(trials), Path(folder), 0)
            tasks = [dataclasses.replace(task, rank=rank) for rank in range(process_count(framework, sizes))]
            with told(Path(folder), progress, len(found), total):
                found += results_of(run_process, tasks)
    return MeshMutationReport(
        tuple(found),
        mesh=dict(sizes),
        configs=configs,
        plants=plants,
        seed=seed,
        environment=environment(),
        seconds=time.perf_counter() - started,
    )


def plan_trials(
    framework: Framework, sizes: Mapping[str, int], configs: int, faults: Sequence[MeshFault], seed: int, plants: int
) -> list[MeshTrial]:
    """Return what is judged in a framework: right pairs, and each fault where the code that goes wrong runs."""
    trials = [MeshTrial("", framework, seed + number) for number in range(configs)]
    for fault in faults:
        start = seed + FAULT_SEEDS + 1000 * MESH_FAULTS.index(fault)
        for _ in range(plants):
            try:
                start = find_seed(start, lambda one, fault=fault: fault.needs(draw_mesh_config(one, sizes)))  # type: ignore[misc]
            except ValueError:  # devices of this mesh can't go wrong so
                break
            trials.append(MeshTrial(fault.name, framework, start))
            start += 1
    return trials


def run_process(task: Task) -> list[MeshResult]:
    """Judge all pairs in one process of a mesh."""
    found = []
    with joined(task) as mesh:
        for number, trial in enumerate(task.trials):
            found.append(run_trial(trial, mesh, dict(task.sizes), task.plain))
            tell_done(task, f"{task.framework} {trial.fault or 'right pairs'}")
            if task.framework == "flax" and (number + 1) % PROGRAMS_OF == 0:
                backends.load("flax", "_parity.mutants").forget_programs()
    return found
