"""Workers as tasks of Ray: it places them, starts again what a machine took with it, and keeps their logs."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Sequence
from typing import Any, Self

from ....printable import printable
from ...containers.base import CheckpointError
from ...containers.files import reason
from ...requests import Prepared, Request
from ..jobs import Job, job_of
from ..working import Advance
from .processes import do_share

RETRIES = 3
"""How many times Ray starts a task again whose process or machine was lost."""

PATIENCE = 10.0
"""Seconds that are waited for a cluster to answer."""

TRIES = 3
"""How many times a cluster of this machine is started: Ray gives it half a minute, and a busy one takes longer."""

TOKEN = "it wants a token, which Ray sends to an address that is given only where RAY_AUTH_MODE=token says so"
"""What helps where a cluster refuses: `ray start` has its clusters ask for the token that lies in ``~/.ray``."""

WORTH = 1 << 30
"""Bytes of a share, about, where nobody says how many there are."""


class Cluster:
    """A connection to Ray, for as long as it is needed.

    Args:
        address: of the cluster; "" finds one (``RAY_ADDRESS``, or one that was started on this machine), or starts one
            on this machine.

    Raises:
        CheckpointError: Ray is not installed, or there is no such cluster.
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
        """Return the job of a conversion by so many tasks of Ray; None: as many as there are processors for."""
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
        CheckpointError: there is none, or it does not start.
    """
    for left in reversed(range(TRIES)):
        try:
            ray.init(address=address or None, logging_level="warning", log_to_driver=False)
            return
        except Exception as error:  # Ray raises plain ones, too
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                shown = f"--ray {printable(address)}" if address else "--ray"
                wants = f"; {TOKEN}" if _is_refused(error) else ""
                raise CheckpointError(f"{shown}: {printable(error, 400)}{wants}") from None


def _is_refused(error: BaseException | None) -> bool:
    """Tell whether a cluster was reached that wants a token; Ray says so in a cause of a cause."""
    while error is not None:
        if "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_reachable(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself tries for many minutes.

    Raises:
        CheckpointError: nobody does.
    """
    hit = re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:([0-9]{1,5})", address)
    if hit is None:
        return
    try:
        socket.create_connection((hit[1], int(hit[2])), PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise CheckpointError(f"--ray {printable(address)}: no cluster is there: {reason(error)}") from None


def share_of_task(asked: dict[str, Any]) -> int:
    """Do a share, and return how many bytes it has."""
    done = 0

    def advance(count: int, name: str) -> None:
        nonlocal done
        done += count

    do_share(asked, advance)
    return done


class Tasks:
    """Tasks of Ray that are under way.

    Args:
        ray: the module.
        tasks: what Ray gave for them.
        advance: told the bytes of each that is at its end.
    """

    def __init__(self, ray: Any, tasks: Sequence[Any], advance: Advance):
        self._ray, self._left, self._advance = ray, list(tasks), advance
        self._count = len(self._left)

    def check(self) -> None:
        """Do nothing: what failed is raised by whoever waits."""

    def wait(self) -> None:
        """Wait until all are at their end.

        Raises:
            CheckpointError: one failed.
        """
        while self._left:
            (one, *_), self._left = self._ray.wait(self._left, num_returns=1)
            try:
                count = self._ray.get(one)
            except self._ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, ValueError):
                    raise CheckpointError(str(cause)) from None
                raise CheckpointError(f"a task of Ray failed: {printable(error, 400)}") from None
            self._advance(count, f"{self._count - len(self._left)} of {self._count} tasks of Ray")

    def stop(self) -> None:
        """Cancel those that are left."""
        for one in self._left:
            self._ray.cancel(one, force=True)
