"""Runs workers: processes of this machine, in tasks of Ray, or started by hand with a number.

Processes of this machine are forked: from the calling process, or, if that has threads or connections, from a
`nursery`, which starts without any. A worker's number comes from the user, or from a launcher's environment variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ....printable import printable
from ...containers.base import CheckpointError

AUTO = "auto"

LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE"), "Slurm": ("SLURM_PROCID", "SLURM_NTASKS")}
"""Launcher -> the variables with the number of a process, from 0, and the number of processes."""

MOST = 100_000
"""Maximum number of workers of a conversion."""


def parse(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return a worker's number, from 0, and the number of workers: of ``I/N``, or for ``auto`` from the environment.

    Raises:
        CheckpointError: the text is neither, or the number is out of range.
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
        assignments = ", ".join(f"{name}={printable(value)}" for name, value in zip(names, values, strict=True))
        if not all(re.fullmatch("[0-9]{1,9}", value or "") for value in values):
            raise CheckpointError(f"--worker {AUTO}: {assignments} must be whole numbers")
        return _checked(f"--worker {AUTO}: {assignments}", *(int(value or "") for value in values))
    launchers = ", or ".join(f"{' and '.join(names)} ({launcher})" for launcher, names in LAUNCHERS.items())
    raise CheckpointError(f"--worker {AUTO} needs {launchers} in the environment; else say --worker I/N")


def _checked(subject: str, index: int, count: int) -> tuple[int, int]:
    if not 0 <= index < count <= MOST:
        raise CheckpointError(f"{subject}: workers are counted from 0, and of N there are 0 to N - 1, N at most {MOST}")
    return index, count
