"""Processes that form a mesh of simulated devices: how they start, report progress, and fail together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attn_bridge import backends
from attn_bridge.sharding import ShardingPlan

from ... import workers
from ...sides.subject import load_adapter

ROLES = ("tensor", "context", "fsdp")
"""Roles of the axes of a mesh, which are also their names."""

MAX_DEVICES = 16
"""Most devices that are simulated."""

FAILED = "failed"
"""File in which failing processes write their errors, in the order in which they fail."""

_POLL = 0.2
"""Seconds between two looks at how far the processes are."""

Outcome = TypeVar("Outcome")


@dataclasses.dataclass(frozen=True)
class MeshTask:
    """The work of one process of a mesh; its text is its name in messages.

    Attributes:
        framework: of the sharded modules.
        plain: framework of the plain ones.
        sizes: of the axes of the mesh, in order.
        folder: where the processes meet, and the first one reports progress.
        rank: number of the process.
    """

    framework: backends.Framework
    plain: backends.Framework
    sizes: tuple[tuple[str, int], ...]
    folder: Path
    rank: int

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"process {self.rank} of the {self.framework} mesh"


OfTask = TypeVar("OfTask", bound=MeshTask)


def check_mesh_sizes(sizes: Mapping[str, int], method: str = "all_gather") -> None:
    """Check that a mesh can be simulated.

    Raises:
        ValueError: an axis, a size or the method is invalid.
    """
    for name, size in sizes.items():
        if name not in ROLES:
            raise ValueError(f"axis of the mesh ({name!r}) must be one of {', '.join(ROLES)}")
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1")
    devices = math.prod(sizes.values())
    if not 2 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices of the mesh ({devices}) must be 2 to {MAX_DEVICES}")
    ShardingPlan.of(sizes, **{name: name for name in sizes}, method=method)


def installed() -> list[backends.Framework]:
    """Return the frameworks that are installed."""
    frameworks = []
    for name in backends.FRAMEWORKS:
        with contextlib.suppress(backends.MissingBackendError):
            backends.require(name, *backends.PACKAGES[name])
            frameworks.append(name)
    return frameworks


def chosen_frameworks(wanted: tuple[str, ...]) -> list[backends.Framework]:
    """Return the frameworks with these names; without names, those that are installed.

    Raises:
        ValueError: a name is unknown.
        MissingBackendError: a framework is not installed.
    """
    for name in wanted:
        if name not in backends.FRAMEWORKS:
            raise ValueError(f"framework ({name!r}) must be one of {', '.join(backends.FRAMEWORKS)}")
    chosen = [name for name in backends.FRAMEWORKS if (name in wanted if wanted else name in installed())]
    for name in chosen:
        backends.require(name, *backends.PACKAGES[name])
    return chosen


def process_count(framework: backends.Framework, sizes: Mapping[str, int]) -> int:
    """Return how many processes a mesh of a framework takes."""
    return math.prod(sizes.values()) if framework == "torch" else 1


def results_of(function: Callable[[OfTask], list[Outcome]], tasks: list[OfTask]) -> list[Outcome]:
    """Run the processes of a mesh, and return the result of the first one; all of them return the same.

    Raises:
        ValueError: a process failed; the message is that of the first failure.
    """
    try:
        return next(iter(list(workers.run(function, tasks, len(tasks), str))))
    except workers.WorkerDiedError:
        raise
    except Exception as error:  # the others may only have lost the one that failed
        failure = tasks[0].folder / FAILED
        raise ValueError(failure.read_text().splitlines()[0] if failure.exists() else str(error)) from error


@contextlib.contextmanager
def told(folder: Path, progress: Callable[[str, int, int], None] | None, before: int, total: int) -> Iterator[None]:
    """Hand on how far the processes are, while the context is held."""
    if progress is None:
        yield
        return
    ended, count = threading.Event(), 0

    def tell() -> None:
        nonlocal count
        log = folder / "progress"
        lines = log.read_text().splitlines() if log.exists() else []
        for line in lines[count:]:
            count += 1
            progress(json.loads(line), before + count, total)

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


@contextlib.contextmanager
def joined(task: MeshTask) -> Iterator[Any]:
    """Yield the mesh that a process is part of; write an error of the body to the file `FAILED`."""
    meshes = load_adapter(task.framework, "meshes")
    try:
        yield meshes.simulate(dict(task.sizes), task.rank, task.folder)
    except Exception as error:  # it is raised again; the other processes lose this one, and fail by that
        with (task.folder / FAILED).open("a") as file:
            file.write(f"{task}: {' '.join(str(error).split())}\n")
        raise
    finally:
        meshes.leave()


def tell_done(task: MeshTask, what: str) -> None:
    """Report a finished step through the task's folder; only rank 0 does."""
    if task.rank == 0:
        with (task.folder / "progress").open("a") as file:
            file.write(json.dumps(what) + "\n")
