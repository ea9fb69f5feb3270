"""What workers do in tests: functions of a module, which a worker can import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


class TwoPartsError(Exception):
    """An error that pickle takes apart and can't put together."""

    def __init__(self, one: str, two: str):
        super().__init__(f"{one} {two}")


def echo(task: Any) -> tuple[int, Any]:
    """Return the process and the task."""
    return os.getpid(), task


def fail(task: str) -> str:
    """Raise what the task says."""
    if task == "value":
        error = ValueError("no such thing")
        error.add_note("try another")
        raise error
    if task == "two parts":
        raise TwoPartsError("one", "two")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "left":
        os._exit(3)
    if task == "lambda":
        return lambda: None  # type: ignore[return-value]  # what pickle refuses
    return task


def interrupt(task: str) -> str:
    """Interrupt this process, as Ctrl-C in a terminal does with all of them."""
    os.kill(os.getpid(), signal.SIGINT)
    return task


def threads(variable: str) -> str | None:
    """Return a variable of the environment."""
    return os.environ.get(variable)


def wait_or_touch(task: tuple[str, str]) -> str:
    """Wait until a file is there, for ten minutes at most, or make it."""
    what, path = task
    if what == "touch":
        Path(path).touch()
    deadline = time.monotonic() + 600
    while what == "wait" and not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what


def hold(folder: str) -> None:
    """Start a child, note both processes in the folder, and do nothing for a long time."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for process in (os.getpid(), child.pid):
        Path(folder, str(process)).touch()
    threading.Event().wait(600)


def echo_or_hold(folder: str) -> None:
    """Return at once, or hold if there is a folder."""
    if folder:
        hold(folder)
