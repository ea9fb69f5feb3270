"""Workers as processes of this machine, which end with the one that started them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Sequence

from ..containers.base import CheckpointError, DiskFullError
from ..requests import Request
from .jobs import Job
from .working import Advance


class Processes:
    """Processes that do shares of a job.

    Args:
        request: what was asked for.
        job: how it is shared.
        run: noted with what they write.
        indices: their numbers.
        advance: told the bytes that they have done.
    """

    def __init__(self, request: Request, job: Job, run: str, indices: Sequence[int], advance: Advance):
        self._advance = advance
        self._errors: collections.deque[Exception] = collections.deque()
        self._children: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []
        asked = {"request": dataclasses.asdict(request), "job": dataclasses.asdict(job), "run": run}
        for index in indices:
            child = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            listener = threading.Thread(target=self._listen, args=(child, index, job.workers), daemon=True)
            self._children.append((child, listener))
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
                child.stdin.write(json.dumps({**asked, "index": index}).encode() + b"\n")
                child.stdin.flush()
            listener.start()

    def _listen(self, child: subprocess.Popen[bytes], index: int, count: int) -> None:
        """Take what a process says until it ends."""
        assert child.stdout is not None
        said = False
        for line in child.stdout:
            found = json.loads(line)
            if "error" in found:
                said = True
                kind = DiskFullError if found.get("is_full") else CheckpointError
                self._errors.append(kind(found["error"]))
            else:
                try:
                    self._advance(found["done"], found["name"])
                except Exception as error:  # of whoever shows the progress
                    self._errors.append(error)
        status = child.wait()
        if status and not said:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            self._errors.append(CheckpointError(f"worker {index} of {count} (process {child.pid}) {how}"))

    def check(self) -> None:
        """Raise what one of them failed with."""
        if self._errors:
            raise self._errors[0]

    def wait(self) -> None:
        """Wait until all are at their end, or one failed."""
        for _, listener in self._children:
            while listener.is_alive():
                listener.join(0.1)
                self.check()
        self.check()

    def stop(self) -> None:
        """End all that are still there."""
        for child, _ in self._children:
            if child.poll() is None:
                child.kill()
        for child, listener in self._children:
            child.wait()
            listener.join()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
