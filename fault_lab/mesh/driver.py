"""How good the judge is on many devices: distributed faults that it must find, right pairs it must not object to."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attn_bridge.backends import FRAMEWORKS, Framework
from attn_parity.check.mesh.processes import (
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
from attn_parity.settings.precision import environment

from ..adapters import load_mutants
from ..driver import CONFIGS, check_number
from ..planted.mutants import FIRST_SEED, find_seed
from .configs import draw_mesh_config
from .faults import MESH_FAULTS, MeshFault, find_mesh_fault
from .report import MeshMutationReport
from .trials import MeshResult, MeshTrial, run_trial

FAULT_SEEDS = 100_000
"""Faults are planted into configurations from this many seeds after the right pairs."""

MAX_DRAWS = 500
"""How many configurations are looked through for one that a fault fits: one in twenty, or none."""

PROGRAMS_OF = 8
"""Trials whose compiled programs a process keeps."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class MutationTask(MeshTask):
    """The trials that one process of a mesh judges.

    Attributes:
        trials: the trials.
    """

    trials: tuple[MeshTrial, ...]


def mutate_mesh(
    sizes: Mapping[str, int],
    configs: int = CONFIGS,
    faults: int | Iterable[str] | None = None,
    seed: int = FIRST_SEED,
    *,
    plants: int = 1,
    frameworks: Iterable[str] = (),
    progress: Progress | None = None,
) -> MeshMutationReport:
    """Measure the share of distributed faults that `compare` finds and names, and of right pairs that it rejects.

    Faults are planted into a hand-written distributed block. Right pairs are that block, and our own modules that
    `parallelize` shares out, drawn in shape, masks, method and precision. The other side is plain.

    Args:
        sizes: size of each axis of the mesh: any of ``tensor``, ``context`` and ``fsdp``.
        configs: number of right pairs of each framework.
        faults: names of faults, or the number of faults, the first ones of the list; None is all. Faults that no
            configuration of this mesh can have are left out.
        seed: the first seed.
        plants: number of times that each fault is planted in each framework.
        frameworks: ``torch``, ``flax``; those that are installed by default.
        progress: called with a stage, the work done and the total.

    Raises:
        ValueError: an invalid axis, size, name or number.
        MissingBackendError: a framework is not installed.
        WorkerDiedError: a process was killed.
    """
    check_mesh_sizes(sizes)
    for name, value, least in (("configs", configs, 0), ("plants", plants, 1), ("seed", seed, 0)):
        check_number(name, value, least)
    wanted, frameworks = _chosen(faults), tuple(frameworks)
    trials = [
        trial
        for framework in chosen_frameworks(frameworks)
        for trial in plan_trials(framework, sizes, configs, wanted, seed, plants)
    ]
    options = [f"--framework {one}" for one in frameworks]
    options += [f"--faults {faults}"] if isinstance(faults, int) else []
    report = _judged(sizes, trials, configs, seed, plants, progress)
    return dataclasses.replace(report, options=tuple(options))


def run_cases(
    sizes: Mapping[str, int], cases: Iterable[str], *, progress: Progress | None = None
) -> MeshMutationReport:
    """Run some trials of a report again, by their names in it: ``FAULT:FRAMEWORK:SEED``, or ``right:...``.

    Raises:
        ValueError: an unknown name, or a configuration that the fault does not apply to.
    """
    check_mesh_sizes(sizes)
    return _judged(sizes, [_trial(case, sizes) for case in cases], 0, FIRST_SEED, 1, progress)


def _trial(case: str, sizes: Mapping[str, int]) -> MeshTrial:
    fault, _, rest = case.partition(":")
    framework, _, number = rest.partition(":")
    if framework not in FRAMEWORKS or not number.isdecimal():
        names = ", ".join(FRAMEWORKS)
        raise ValueError(f"case ({case}) must read FAULT:FRAMEWORK:SEED or right:FRAMEWORK:SEED, of {names}")
    name = "" if fault == "right" else find_mesh_fault(fault).name
    if name and not find_mesh_fault(name).needs(draw_mesh_config(int(number), sizes)):
        raise ValueError(f"case ({case}): the configuration of seed {number} does not have what this fault needs")
    return MeshTrial(name, "torch" if framework == "torch" else "flax", int(number))


def _chosen(faults: int | Iterable[str] | None) -> tuple[MeshFault, ...]:
    if faults is None:
        return MESH_FAULTS
    if not isinstance(faults, int):
        return tuple(map(find_mesh_fault, faults))
    check_number("faults", faults, 0)
    if faults > len(MESH_FAULTS):
        raise ValueError(f"faults ({faults}) must be at most {len(MESH_FAULTS)}")
    return MESH_FAULTS[:faults]


def _judged(
    sizes: Mapping[str, int], trials: list[MeshTrial], configs: int, seed: int, plants: int, progress: Progress | None
) -> MeshMutationReport:
    started = time.perf_counter()
    results: list[MeshResult] = []
    for framework in FRAMEWORKS:
        own = tuple(trial for trial in trials if trial.framework == framework)
        if not own:
            continue
        with tempfile.TemporaryDirectory() as folder:
            plain: Framework = "torch" if "torch" in installed() else framework
            task = MutationTask(framework, plain, tuple(sizes.items()), Path(folder), 0, own)
            tasks = [dataclasses.replace(task, rank=rank) for rank in range(process_count(framework, sizes))]
            with told(Path(folder), progress, len(results), len(trials)):
                results += results_of(run_process, tasks)
    return MeshMutationReport(
        tuple(results), dict(sizes), configs, plants, seed, environment(), time.perf_counter() - started
    )


def plan_trials(
    framework: Framework, sizes: Mapping[str, int], configs: int, faults: Sequence[MeshFault], seed: int, plants: int
) -> list[MeshTrial]:
    """Return the trials of a framework: right pairs, and each fault in configurations that run the faulty code."""
    trials = [MeshTrial("", framework, seed + number) for number in range(configs)]
    for fault in faults:
        start = seed + FAULT_SEEDS + 1000 * MESH_FAULTS.index(fault)
        for _ in range(plants):
            fits = functools.partial(_fits, fault, sizes)
            try:
                start = find_seed(start, fits, MAX_DRAWS)
            except ValueError:  # devices of this mesh can't go wrong so
                break
            trials.append(MeshTrial(fault.name, framework, start))
            start += 1
    return trials


def _fits(fault: MeshFault, sizes: Mapping[str, int], seed: int) -> bool:
    return fault.needs(draw_mesh_config(seed, sizes))


def run_process(task: MutationTask) -> list[MeshResult]:
    """Judge all pairs in one process of a mesh."""
    results = []
    with joined(task) as mesh:
        for number, trial in enumerate(task.trials):
            results.append(run_trial(trial, mesh, dict(task.sizes), task.plain))
            tell_done(task, f"{task.framework} {trial.fault or 'right pairs'}")
            if task.framework == "flax" and (number + 1) % PROGRAMS_OF == 0:
                load_mutants("flax", "mutants").forget_programs()
    return results
