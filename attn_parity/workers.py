"""Worker processes: fresh interpreters that run tasks of one kind, and that end with their parent.

They are spawned, not forked, because the threads of XLA and OpenMP do not survive a fork. So a worker does not see
changes that this process made after its imports; a function that was replaced in this process is the original one in
the worker.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

from attn_bridge.backends import usable_cores
from attn_bridge.signals import uninterrupted

from .watch import end_children

MAX_JOBS = 4
"""Most processes that are started without being asked for; each holds both frameworks."""

THREADS = ("OMP_NUM_THREADS", "NPROC")
"""Variables that torch and XLA read the number of their threads from."""

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerDiedError(ChildProcessError):
    """A worker ended before its task did; the message names the cause and the task."""


class _WorkerTracebackError(Exception):
    """The worker's traceback of an exception that is raised again in this process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run(
    function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, name: Callable[[Task], object] = str
) -> Generator[Result]:
    """Run tasks in `jobs` processes and yield their results in the order of the tasks.

    Tasks begin in order, one by one, on the next free worker. An exception of a task is raised again when its turn
    comes. All workers are ended when the iterator ends, also by Ctrl-C; close it if you leave early.

    Args:
        function: a function of a module, which a worker imports; it is called with a task.
        tasks: the arguments of the calls; they and the results are pickled.
        jobs: number of processes, at most the number of tasks.
        name: returns the name of a task, for the message about a worker that died.

    Raises:
        WorkerDiedError: a worker was killed, or exited.
    """
    jobs = min(jobs, len(tasks))
    waiting = collections.deque(enumerate(tasks))
    crew: list[_Worker] = []
    done: dict[int, _Outcome] = {}
    try:
        while len(crew) < jobs:
            with uninterrupted():
                crew.append(_Worker(function, threads=max(1, usable_cores() // jobs)))
        for worker in crew:
            worker.begin(*waiting.popleft())
        for position in range(len(tasks)):
            while position not in done:
                at_work: list[Any] = [worker for worker in crew if worker.number is not None]
                ready: list[Any] = wait(at_work)
                for worker in ready:
                    number, done[number] = worker.finish(lambda number: str(name(tasks[number])))
                    if waiting:
                        worker.begin(*waiting.popleft())
            yield done.pop(position).value()
    finally:
        with uninterrupted():
            for worker in crew:
                worker.end()


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """The outcome of a task: its result, or its exception with the traceback."""

    result: Any
    error: BaseException | None = None
    where: str = ""

    def value(self) -> Any:
        if self.error is not None:
            raise self.error from _WorkerTracebackError(self.where)
        return self.result


class _Worker:
    """A process, and the connection that it gets tasks and gives results by.

    Attributes:
        number: that of the task that it is at, None if it is at none.
    """

    def __init__(self, function: Callable[[Any], object], threads: int):
        self.number: int | None = None
        self._function = function
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        program = f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; from attn_parity import workers; "
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{program}workers.work({descriptor}, {threads})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
            )

    def begin(self, number: int, task: object) -> None:
        """Hand over a task."""
        self.number = number
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which `finish` says
            self._connection.send((self._function, task))

    def finish(self, name: Callable[[int], str]) -> tuple[int, _Outcome]:
        """Wait for the running task; return its number and outcome.

        Raises:
            WorkerDiedError: the process has ended.
        """
        assert self.number is not None
        number, self.number = self.number, None
        try:
            sent = self._connection.recv_bytes()
        except (EOFError, OSError):
            how = _how_it_ended(self._process.wait())
            raise WorkerDiedError(f"a worker process {how} while it ran {name(number)}") from None
        return number, pickle.loads(sent)

    def end(self) -> None:
        """End the process with all that it started."""
        if self._process.poll() is None:
            end_children(self._process.pid)
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the worker has a result."""
        return self._connection.fileno()


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


# ---- in the worker


def work(descriptor: int, threads: int) -> None:
    """Run the tasks that arrive through a connection, until the parent ends this process, or ends."""
    faulthandler.enable()  # what a signal ends says where it was
    for variable in THREADS:  # the frameworks are imported after this
        os.environ.setdefault(variable, str(threads))
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    while True:
        _send(connection, _outcome(received.get()))


def _receive(connection: Connection, received: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            received.put(connection.recv_bytes())
    end_children()  # killed, who sends the tasks tells nobody: a worker would wait for ever
    os._exit(1)


def _outcome(sent: bytes) -> _Outcome:
    try:
        function, task = pickle.loads(sent)
        return _Outcome(function(task))
    except BaseException as error:  # whatever it is, it is raised where the tasks come from
        return _failure(error)


def _send(connection: Connection, outcome: _Outcome) -> None:
    try:
        connection.send(outcome)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        connection.send(_failure(error))


def _failure(error: BaseException) -> _Outcome:
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error that can't travel says all the same what it is
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Outcome(None, error, where)
