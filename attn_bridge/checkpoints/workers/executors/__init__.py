"""Where workers run: processes of this machine, in tasks of Ray, or started by hand under a number.

Those of this machine are forked: from the process that asks for them, or, where that has threads or connections, from
a `nursery`, which begins without any. A worker's number is what a user says, or what a launcher has put into the
environment.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ....printable import printable
from ...containers.base import CheckpointError
from ...containers.remote import is_url
from ..conducting import CORES, Helpers, most

if TYPE_CHECKING:
    from ...requests import Prepared, Request
    from ..jobs import Job
    from ..working import Advance
    from .nursery import Nursery


@contextlib.contextmanager
def early(request: Request, workers: int | None) -> Iterator[Nursery | None]:
    """Begin a nursery where a conversion may need one: of a store, by several workers."""
    urls = [one for one in (request.source, request.target) if is_url(one)]
    count = (os.cpu_count() or 1) // CORES if workers is None else workers
    if not urls or isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= most():
        yield None
        return
    from .nursery import Nursery

    with Nursery([url.partition(":")[0] for url in urls]) as nursery:
        if workers is not None:
            with contextlib.suppress(TypeError):  # settings that are no JSON: what refuses them says why
                nursery.expect(request, count - 1)
        yield nursery


def start(
    request: Request, prepared: Prepared, job: Job, run: str, indices: Sequence[int], advance: Advance
) -> Helpers:
    """Start workers of these numbers on this machine."""
    from .nursery import Nursery
    from .processes import Processes

    if Processes.may_fork():
        return Processes(prepared, job, run, indices, advance)
    return Nursery(()).start(request, prepared, job, run, indices, advance)


AUTO = "auto"

LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE"), "Slurm": ("SLURM_PROCID", "SLURM_NTASKS")}
"""Launcher -> the variables that say which of its processes one is, from 0, and of how many."""

MOST = 100_000
"""Workers of one conversion."""


def parse(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return a worker's number, from 0, and how many there are: of ``I/N``, or for ``auto`` as a launcher says.

    Raises:
        CheckpointError: it is neither, or there is no such worker.
    """
    if text != AUTO:
        hit = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if hit is None:
            raise CheckpointError(f"--worker ({printable(text)}) must be I/N, such as 0/4, or {AUTO}")
        return _checked(f"--worker ({text})", int(hit[1]), int(hit[2]))
    for names in LAUNCHERS.values():
        values = [environment.get(name) for name in names]
        if None in values:
            continue
        said = ", ".join(f"{name}={printable(value)}" for name, value in zip(names, values, strict=True))
        if not all(re.fullmatch("[0-9]{1,9}", value or "") for value in values):
            raise CheckpointError(f"--worker {AUTO}: {said} must be whole numbers")
        return _checked(f"--worker {AUTO}: {said}", *(int(value or "") for value in values))
    known = ", or ".join(f"{' and '.join(names)} ({launcher})" for launcher, names in LAUNCHERS.items())
    raise CheckpointError(f"--worker {AUTO} needs {known} in the environment; else say --worker I/N")


def _checked(said: str, index: int, count: int) -> tuple[int, int]:
    if not 0 <= index < count <= MOST:
        raise CheckpointError(f"{said}: workers are counted from 0, and of N there are 0 to N - 1, N at most {MOST}")
    return index, count
