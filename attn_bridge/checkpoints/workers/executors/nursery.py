"""A process from which workers are forked: it has imported their packages, and has neither threads nor connections.

Connections to stores are made in a thread, and a process with threads can't be forked. Therefore this process starts
before the first connection, by a fork if still possible. If the number of workers is fixed in advance, they open the
source while the caller does so too; their shares follow once a plan exists. If the caller can't be forked for another
reason, such as an imported framework, the nursery starts then.
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
from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn, TextIO

from ....whole_files import JsonObject
from ...containers.base import DiskFullError
from ...requests import Prepared, Request
from ..jobs import Helpers, Job
from ..working import Advance
from .processes import Child, Fork, Processes, Watched, do_share_of, end_with, read_line, report


class Nursery:
    """The nursery process, seen from the process that requests workers.

    Args:
        protocols: of the stores that workers will connect to; none for local files.
    """

    command: ClassVar[tuple[str, ...]] = (
        sys.executable,
        "-c",
        f"from {__name__} import main; main()",
    )
    """Command that starts the process if this one can't be forked; the protocols follow."""

    def __init__(self, protocols: Sequence[str]):
        self._child: Child
        self._expected = 0
        if Processes.may_fork():
            from ...containers.remote.connecting import preload  # local files need none of it

            preload(protocols)
        if Processes.may_fork():  # still
            self._child = Fork(serve, ())
        else:
            command = [*self.command, *protocols]
            # In a separate process group, a keyboard interrupt doesn't hit it during its imports.
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)

    def expect(self, request: Request, count: int) -> None:
        """Start `count` workers that open a conversion."""
        tell(self._child, {"request": dataclasses.asdict(request), "count": count})
        self._expected = count

    def start(
        self, request: Request, prepared: Prepared, job: Job, run: str, indices: Sequence[int], advance: Advance
    ) -> Helpers:
        """Send the workers with these numbers their shares."""
        if not self._expected:
            self.expect(request, len(indices))
        tell(self._child, {"job": dataclasses.asdict(job), "run": run, "indices": list(indices)})
        return _Asked(self._child, advance)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and all workers with it."""
        end(self._child)


def tell(child: Child, message: Mapping[str, object]) -> None:
    """Write a line of JSON to a process."""
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its report has the reason
        child.stdin.write(json.dumps(message).encode() + b"\n")
        child.stdin.flush()


def end(child: Child) -> None:
    """End the process with all its workers: it ends them when its input closes."""
    with contextlib.suppress(OSError):
        child.stdin.close()
    child.wait()
    with contextlib.suppress(OSError):
        child.stdout.close()


class _Asked(Watched):
    """The workers of a nursery, seen from the requesting process: the nursery reports for all of them."""

    def __init__(self, nursery: Child, advance: Advance):
        super().__init__(advance)
        self._children = [nursery]
        self._hear(["the process of the workers"])

    def stop(self) -> None:
        """End all that are still there."""
        with contextlib.suppress(OSError):
            self._children[0].stdin.close()
        for listener in self._listeners:  # reports sent before the end are still read
            listener.join()
        end(self._children[0])


class _Forked(Watched):
    """The workers of a nursery, seen from the nursery itself.

    Args:
        request: the conversion that they open.
        count: number of workers.
        advance: called with the bytes that they have done.
    """

    def __init__(self, request: Request, count: int, advance: Advance):
        super().__init__(advance)
        for _ in range(count):
            self._children.append(Fork(functools.partial(_share_once_told, request), self._children))

    def go_on(self, asked: JsonObject, pipe: int) -> None:
        """Send the workers their shares, and end all of them when a pipe closes; starts threads."""
        indices = asked.pop("indices")
        for child in self._children[len(indices) :]:  # for whom nothing is left
            child.kill()
            end(child)
        del self._children[len(indices) :]
        for child, index in zip(self._children, indices, strict=True):
            tell(child, {**asked, "index": index})
        threading.Thread(target=self._end_with, args=(pipe,), daemon=True).start()
        self._hear([f"worker {index} of {asked['job']['workers']}" for index in indices])

    def _end_with(self, pipe: int) -> None:
        while os.read(pipe, 1 << 12):
            pass
        self.kill()
        os._exit(1)

    def kill(self) -> None:
        """Kill all remaining workers, ignoring their output."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()


def _share_once_told(request: Request, pipe: int, lines: TextIO) -> int:
    """Open a conversion, do the share that arrives through a pipe, and return the exit status."""
    heard = end_with(pipe)

    def work(advance: Advance) -> None:
        with request.opened() as prepared:
            identity = prepared.identity()  # of the opened files, before the share arrives
            do_share_of(prepared, identity, heard.get(), advance)

    return report(work, lines)


def serve(pipe: int, lines: TextIO) -> int:
    """Fork the workers that JSON lines in a pipe request, and relay their reports; return the exit status."""
    expected = read_line(pipe)
    if expected is None:  # nothing was to be done
        return 0
    lock = threading.Lock()

    def say(message: Mapping[str, object]) -> None:
        with lock:
            print(json.dumps(message), file=lines, flush=True)

    request = Request(**expected["request"])
    workers = _Forked(request, expected["count"], lambda count, name: say({"done": count, "name": name}))
    asked = read_line(pipe)
    if asked is None:
        workers.kill()
        return 0
    workers.go_on(asked, pipe)
    try:
        workers.wait()
    except Exception as error:  # the requesting process reports it
        with contextlib.suppress(BrokenPipeError):  # it is gone
            say({"error": str(error), "is_full": isinstance(error, DiskFullError)})
        workers.stop()
        return 1
    return 0


def main() -> NoReturn:
    """Serve on stdin and stdout, and exit without flushing output that has no reader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent is interrupted as well
    if protocols := sys.argv[1:]:
        from ...containers.remote.connecting import preload  # local files need none of it

        preload(protocols)
    os._exit(serve(sys.stdin.fileno(), sys.stdout))
