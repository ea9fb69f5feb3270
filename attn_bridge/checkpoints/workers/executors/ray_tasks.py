"""Workers as tasks of Ray, which places them, restarts those of lost machines, and keeps their logs."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Sequence
from typing import Any, Self

from ....printable import printable
from ....whole_files import JsonObject
from ...containers.base import CheckpointError
from ...containers.files import reason
from ...requests import Prepared, Request
from ..jobs import Job, job_of
from ..working import Advance
from .processes import do_share

RETRIES = 3
"""Restarts by Ray of a task whose process or machine was lost."""

PATIENCE = 10.0
"""Seconds to wait for a cluster's answer."""

TRIES = 3
"""Attempts to start a cluster on this machine: Ray gives it half a minute, and a busy machine takes longer."""

TOKEN = "it wants a token, which Ray sends to an address that is given only where RAY_AUTH_MODE=token says so"
"""Advice for a refused connection: clusters of `ray start` require the token stored in ``~/.ray``."""

WORTH = 1 << 30
"""Approximate bytes of a share, where the user gives no number of workers."""


class Cluster:
    """A connection to Ray, for the duration of a conversion.

    Args:
        address: of the cluster; "" finds one (``RAY_ADDRESS``, or one that was started on this machine), or starts one
            on this machine.

    Raises:
        CheckpointError: Ray is not installed, or the cluster does not exist.
    """

    def __init__(self, address: str):
        try:
            import ray
        except ImportError:
            raise CheckpointError("--ray needs Ray: pip install 'attn-bridge[ray]'") from None
        self._ray: Any = ray
        self._is_own = not ray.is_initialized()
        if self._is_own:
            _check_reachable(address)
            _connect(ray, address)

    def job(self, prepared: Prepared, workers: int | None, task_bytes: int | None) -> Job:
        """Return the job of a conversion by that many tasks of Ray; None: up to one per processor, by size."""
        most = int(self._ray.cluster_resources().get("CPU", 1))
        usual = max(1, min(most, prepared.plan.nbytes // WORTH))
        return job_of(prepared, usual if workers is None else workers, task_bytes)

    def start(
        self, request: Request, prepared: Prepared, job: Job, run: str, indices: Sequence[int], advance: Advance
    ) -> Tasks:
        """Have Ray run tasks."""
        asked = {"request": dataclasses.asdict(request), "job": dataclasses.asdict(job), "run": run}
        remote = self._ray.remote(num_cpus=1, max_retries=RETRIES)(share_of_task)
        return Tasks(self._ray, [remote.remote({**asked, "index": index}) for index in indices], advance)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_own:
            self._ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, or start one.

    Raises:
        CheckpointError: no cluster answers, or it does not start.
    """
    for left in reversed(range(TRIES)):
        try:
            ray.init(address=address or None, logging_level="warning", log_to_driver=False)
            return
        except Exception as error:  # Ray raises plain exceptions as well
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                option = f"--ray {printable(address)}" if address else "--ray"
                wants = f"; {TOKEN}" if _is_refused(error) else ""
                raise CheckpointError(f"{option}: {printable(error, 400)}{wants}") from None


def _is_refused(error: BaseException | None) -> bool:
    """Return whether a cluster rejected the connection for want of a token; Ray reports this in nested causes."""
    while error is not None:
        if "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_reachable(address: str) -> None:
    """Refuse an address without a listening server: Ray itself tries for many minutes.

    Raises:
        CheckpointError: the connection fails.
    """
    hit = re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:([0-9]{1,5})", address)
    if hit is None:
        return
    try:
        socket.create_connection((hit[1], int(hit[2])), PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise CheckpointError(f"--ray {printable(address)}: no cluster is there: {reason(error)}") from None


def share_of_task(asked: JsonObject) -> int:
    """Do a share, and return its bytes."""
    done = 0

    def advance(count: int, name: str) -> None:
        nonlocal done
        done += count

    do_share(asked, advance)
    return done


class Tasks:
    """Running tasks of Ray.

    Args:
        ray: the module.
        tasks: Ray's references to them.
        advance: called with the bytes of each finished task.
    """

    def __init__(self, ray: Any, tasks: Sequence[Any], advance: Advance):
        self._ray, self._left, self._advance = ray, list(tasks), advance
        self._count = len(self._left)

    def check(self) -> None:
        """Do nothing: errors are raised by `wait`."""

    def wait(self) -> None:
        """Wait until all tasks have finished.

        Raises:
            CheckpointError: one failed.
        """
        while self._left:
            (task, *_), self._left = self._ray.wait(self._left, num_returns=1)
            try:
                count = self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, ValueError):
                    raise CheckpointError(str(cause)) from None
                raise CheckpointError(f"a task of Ray failed: {printable(error, 400)}") from None
            self._advance(count, f"{self._count - len(self._left)} of {self._count} tasks of Ray")

    def stop(self) -> None:
        """Cancel the remaining tasks."""
        for task in self._left:
            self._ray.cancel(task, force=True)
