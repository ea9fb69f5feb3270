"""Processes that meet on a mesh and stay for the next: each imports both frameworks, which takes seconds."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from attn_bridge.signals import uninterrupted
from attn_parity import workers

Task = TypeVar("Task")
Result = TypeVar("Result")

_crew: list[workers._Worker] = []


def run(function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Run each task in a process, all at the same time, and return their results in the order of the tasks.

    Args:
        function: a function of a module, which leaves the process as it was; torch may be used, JAX may not, whose
            number of devices is settled by its first use.
        tasks: the arguments of the calls.

    Raises:
        WorkerDiedError: a process has ended. This and what a task raises end all of them; the next call starts others.
    """
    found: dict[int, Result] = {}
    try:
        with uninterrupted():
            _crew.extend(workers._Worker(function, threads=1) for _ in range(len(_crew), len(tasks)))
        for number, (worker, task) in enumerate(zip(_crew, tasks, strict=False)):
            worker._function = function
            worker.begin(number, task)
        while at_work := [worker for worker in _crew if worker.number is not None]:
            for worker in wait(at_work):
                number, outcome = worker.finish(lambda number: str(tasks[number]))
                found[number] = outcome.value()
        return [found[number] for number in range(len(tasks))]
    except BaseException:
        end()
        raise


def on_a_mesh(function: Callable[[Any], Result], count: int, task: Callable[[Path, int], Any]) -> list[Result]:
    """Run a function in processes that meet in a folder of their own.

    Args:
        function: as of `run`.
        count: how many processes meet.
        task: returns the argument of a process, of the folder and its number.
    """
    with tempfile.TemporaryDirectory() as folder:
        return run(function, [task(Path(folder), rank) for rank in range(count)])


@atexit.register
def end() -> None:
    """End the processes."""
    while _crew:
        _crew.pop().end()
