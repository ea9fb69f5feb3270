"""A process that workers are forked from: it has imported what they need, and has neither threads nor connections.

Connections to stores are made in a thread, and a process that has threads can't be forked. So this one begins before
the first connection is made, forked where that is still possible, and is asked for workers once there is a plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn, TextIO

from ..containers.base import DiskFullError
from ..containers.remote import is_url
from ..requests import Prepared, Request
from .conducting import CORES, Helpers
from .jobs import Job
from .process import do_share, work_and_report
from .processes import Child, Fork, Processes, Watched
from .working import Advance


@contextlib.contextmanager
def early(request: Request, workers: int | None) -> Iterator[Nursery | None]:
    """Begin a nursery where a conversion may need one: of a store, by several workers."""
    urls = [one for one in (request.source, request.target) if is_url(one)]
    most = (os.cpu_count() or 1) // CORES if workers is None else workers
    if not urls or isinstance(most, bool) or not isinstance(most, int) or most < 2:
        yield None
        return
    with Nursery([url.partition(":")[0] for url in urls]) as nursery:
        yield nursery


class Nursery:
    """The process, seen from the one that asks it for workers.

    Args:
        protocols: of the stores that workers will connect to.
    """

    command: ClassVar[tuple[str, ...]] = (
        sys.executable,
        "-c",
        f"from {__name__} import main; main()",
    )
    """What starts it where this process can't be forked; the protocols follow."""

    def __init__(self, protocols: Sequence[str]):
        self._child: Child
        if Processes.may_fork():
            from ..containers.remote.connecting import preload  # what is local needs none of it

            preload(protocols)
        if Processes.may_fork():  # still
            self._child = Fork(serve, ())
        else:
            command = [*self.command, *protocols]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)

    def start(
        self, request: Request, prepared: Prepared, job: Job, run: str, indices: Sequence[int], advance: Advance
    ) -> Helpers:
        """Have workers of these numbers do their shares."""
        asked = {"request": dataclasses.asdict(request), "job": dataclasses.asdict(job), "run": run}
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
            self._child.stdin.write(json.dumps({**asked, "indices": list(indices)}).encode() + b"\n")
            self._child.stdin.flush()
        return _Asked(self._child, advance)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        end(self._child)


def end(child: Child) -> None:
    """End it, with all workers: it ends them when nobody can ask it any more."""
    with contextlib.suppress(OSError):
        child.stdin.close()
    child.wait()
    with contextlib.suppress(OSError):
        child.stdout.close()


class _Asked(Watched):
    """The workers of a nursery, seen from the process that asked for them: one that speaks for all."""

    def __init__(self, nursery: Child, advance: Advance):
        super().__init__(advance)
        self._children = [nursery]
        self._hear(["the process of the workers"])

    def stop(self) -> None:
        """End all that are still there."""
        with contextlib.suppress(OSError):
            self._children[0].stdin.close()
        for listener in self._listeners:  # what was said by then is still heard
            listener.join()
        end(self._children[0])


class _Forked(Watched):
    """The workers of a nursery, seen from itself."""

    def __init__(self, asked: dict[str, Any], advance: Advance, pipe: int):
        super().__init__(advance)
        count = asked["job"]["workers"]
        for index in asked["indices"]:
            share = functools.partial(do_share, {**asked, "index": index})
            self._children.append(Fork(functools.partial(work_and_report, share), self._children))
        threading.Thread(target=self._end_with, args=(pipe,), daemon=True).start()
        self._hear([f"worker {index} of {count}" for index in asked["indices"]])

    def _end_with(self, pipe: int) -> None:
        while os.read(pipe, 1 << 12):
            pass
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()
        os._exit(1)


def serve(pipe: int, lines: TextIO) -> int:
    """Fork the workers that a line of JSON in a pipe asks for, and say what they say; return the exit status."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(pipe, 1 << 16)
        if not data:  # nothing was to be done
            return 0
        line += data
    said = threading.Lock()

    def say(found: dict[str, Any]) -> None:
        with said:
            print(json.dumps(found), file=lines, flush=True)

    workers = _Forked(json.loads(line), lambda count, name: say({"done": count, "name": name}), pipe)
    try:
        workers.wait()
    except Exception as error:  # whoever asked says it in its place
        with contextlib.suppress(BrokenPipeError):  # it is gone
            say({"error": str(error), "is_full": isinstance(error, DiskFullError)})
        workers.stop()
        return 1
    return 0


def main() -> NoReturn:
    """Serve on stdin and stdout, and end without another try to say what nobody hears."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it is interrupted, too
    from ..containers.remote.connecting import preload  # what is local needs none of it

    preload(sys.argv[1:])
    os._exit(serve(sys.stdin.fileno(), sys.stdout))
