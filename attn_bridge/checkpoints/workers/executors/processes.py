"""Workers as processes of this machine, which end with the process that started them.

A worker process reports its progress in JSON lines. It ends when the pipe that delivers its share closes, since the
process that started it is gone then.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol, TextIO

from ....signals import uninterrupted
from ....whole_files import JsonObject
from ... import copying
from ...containers.base import CheckpointError, DiskFullError
from ...requests import Prepared, Request
from ..jobs import Job, cut, share
from ..places import place_of, staging
from ..working import Advance, work


def do_share(asked: JsonObject, advance: Advance) -> None:
    """Do the requested share of one worker, without publishing.

    Raises:
        ValueError: the source changed, or can't be read or written.
    """
    with Request(**asked["request"]).opened() as prepared:
        do_share_of(prepared, prepared.identity(), asked, advance)


def do_share_of(prepared: Prepared, identity: str, asked: JsonObject, advance: Advance) -> None:
    """Do the requested share of an open conversion.

    Args:
        prepared: the conversion.
        identity: its identity when it was opened.
        asked: the job, the run and the worker's number.
        advance: called with the bytes done.

    Raises:
        ValueError: the source differs from that of the requesting process, or can't be read or written.
    """
    job = Job(**asked["job"])
    if identity != job.plan:
        raise CheckpointError(f"{prepared.reader.path} changed while it was read; convert it again")
    write_share(prepared, job, asked["run"], asked["index"], advance)


def write_share(prepared: Prepared, job: Job, run: str, index: int, advance: Advance) -> None:
    """Do the share of one worker of a run."""
    staging_area = place_of(prepared.target)
    with staging_area.helping(job), copying.beside(job.workers):
        mine = share(cut(prepared.plan, job.task_bytes, job.workers), index, job.workers)
        work(prepared, staging_area, mine, job, run, advance)


def report(work: Callable[[Advance], None], lines: TextIO) -> int:
    """Run `work`, report its progress or its error in JSON lines, and return the exit status."""

    def say(count: int, name: str) -> None:
        print(json.dumps({"done": count, "name": name}), file=lines, flush=True)

    try:
        work(say)
    except Exception as error:  # the parent reports it
        text = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        print(json.dumps({"error": text, "is_full": isinstance(error, DiskFullError)}), file=lines, flush=True)
        return 1
    return 0


def read_line(pipe: int) -> JsonObject | None:
    """Return the next JSON line of a pipe, or None if the pipe ends before."""
    with open(pipe, "rb", buffering=0, closefd=False) as lines:  # nothing of what follows is taken
        line = lines.readline()
    message: JsonObject | None = json.loads(line) if line.endswith(b"\n") else None
    return message


def end_with(pipe: int) -> queue.SimpleQueue[JsonObject]:
    """End this process when a pipe closes, whose other end belongs to its parent; return a queue of its JSON lines."""
    heard: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()

    def listen() -> None:
        while (message := read_line(pipe)) is not None:
            heard.put(message)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    return heard


def work_and_report(work: Callable[[Advance], None], pipe: int, lines: TextIO) -> int:
    """Run `work` until a pipe closes, report its progress or its error, and return the exit status."""
    end_with(pipe)
    return report(work, lines)


THREADED = ("torch", "jax", "ray", "tensorstore")
"""Packages that start threads: a process that has imported one is not forked."""


class Child(Protocol):
    """A process, as `subprocess` has it."""

    pid: int
    stdin: Any
    stdout: Any

    def poll(self) -> int | None:
        """Return its exit status if it has ended."""

    def wait(self) -> int:
        """Return its exit status once it has ended."""

    def kill(self) -> None:
        """End it."""


class Watched:
    """Processes whose reports are read until they end.

    Args:
        advance: called with the bytes that they have done.
    """

    def __init__(self, advance: Advance):
        self._advance = advance
        self._errors: collections.deque[Exception] = collections.deque()
        self._children: list[Child] = []
        self._listeners: list[threading.Thread] = []

    def _hear(self, names: Sequence[str]) -> None:
        """Start a thread per process that reads its reports."""
        self._listeners = [
            threading.Thread(target=self._listen, args=(child, name), daemon=True)
            for child, name in zip(self._children, names, strict=True)
        ]
        for listener in self._listeners:
            listener.start()

    def _listen(self, child: Child, name: str) -> None:
        """Read the reports of a process until it ends."""
        has_error = False
        for line in child.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # printed by a library, or cut short by a kill
                continue
            if not isinstance(message, dict):
                continue
            if "error" in message:
                has_error = True
                kind = DiskFullError if message.get("is_full") else CheckpointError
                self._errors.append(kind(message["error"]))
            else:
                try:
                    self._advance(message["done"], message["name"])
                except Exception as error:  # raised by the progress callback
                    self._errors.append(error)
        status = child.wait()
        if status and not has_error:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            self._errors.append(CheckpointError(f"{name} (process {child.pid}) {how}"))

    def check(self) -> None:
        """Raise the first error of a process."""
        if self._errors:
            raise self._errors[0]

    def wait(self) -> None:
        """Wait until all processes have ended, or one failed."""
        for listener in self._listeners:
            while listener.is_alive():
                listener.join(0.1)
                self.check()
        self.check()

    def stop(self) -> None:
        """End all remaining processes."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for listener in self._listeners:
            listener.join()
        for child in self._children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()


class Processes(Watched):
    """Forks of this process, which must be forkable, that do shares of a job.

    Args:
        prepared: the open conversion.
        job: how it is shared.
        run: noted with their output.
        indices: their numbers.
        advance: called with the bytes that they have done.
    """

    def __init__(self, prepared: Prepared, job: Job, run: str, indices: Sequence[int], advance: Advance):
        super().__init__(advance)
        try:
            with uninterrupted():
                for index in indices:  # all of them before there is a thread
                    share = functools.partial(write_share, prepared, job, run, index)
                    self._children.append(Fork(functools.partial(work_and_report, share), self._children))
                self._hear([f"worker {index} of {job.workers}" for index in indices])
        except BaseException:  # the caller gets no object to stop
            self.stop()
            raise

    @staticmethod
    def may_fork() -> bool:
        """Return whether this process can be forked, which starts workers fast: it has no threads."""
        alone = threading.active_count() == 1 and not any(name in sys.modules for name in THREADED)
        return alone and sys.platform.startswith("linux")


class Fork:
    """A forked process, with the interface of `subprocess.Popen`.

    Args:
        work: its function; called with a pipe that closes with the parent, and a file for its reports; returns the exit
            status.
        others: earlier forks, whose pipes it must not keep open.
    """

    def __init__(self, work: Callable[[int, TextIO], int], others: Sequence[Child]):
        foreign = [pipe.fileno() for other in others for pipe in (other.stdin, other.stdout)]
        life, self_life = os.pipe()
        read_end, write_end = os.pipe()
        with uninterrupted():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # libraries' threads hold none of our locks
                self.pid = os.fork()
            if not self.pid:
                status = 1
                try:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent is interrupted as well
                    for pipe in (self_life, read_end, *foreign):
                        os.close(pipe)
                    staging.let_go()
                    with os.fdopen(write_end, "w", encoding="utf-8") as lines:
                        status = work(life, lines)
                finally:
                    os._exit(status)
        os.close(life)
        os.close(write_end)
        self.stdin: BinaryIO = os.fdopen(self_life, "wb")
        self.stdout: BinaryIO = os.fdopen(read_end, "rb")
        self._status: int | None = None
        self._lock = threading.Lock()

    def _ask(self, options: int) -> int | None:
        with self._lock:
            if self._status is None:
                try:
                    pid, status = os.waitpid(self.pid, options)
                except ChildProcessError:  # SIGCHLD is ignored: the system forgets how it ended
                    pid, status = self.pid, 0
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

    def poll(self) -> int | None:
        """Return its exit status if it has ended."""
        return self._ask(os.WNOHANG)

    def wait(self) -> int:
        """Return its exit status once it has ended."""
        status = self._ask(0)
        assert status is not None
        return status

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
