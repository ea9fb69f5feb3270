"""Watch user code that may never return: name the side, the phase and the line, and end the process.

Code that runs a side declares it with `phase`. Without a declaration the stack decides: a call of a room of
`frameworks` belongs to one side, and a call of the framework's backward pass is its gradient.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from . import breadcrumbs, stack

STATUS = 2
"""Exit status of a process that is ended."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Of Linux's prctl: the signal that a process gets when its parent ends; orphans become children of this process."""

TICK = 0.1
"""Seconds between two looks."""

IMPORTING = "importing"

SHOWN = {"flax": "Flax"}
"""As `findings.SHOWN`, without loading NumPy."""

LIBRARIES = 120.0
"""Seconds that a library may take to be imported, whatever the limit is."""

_exit = os._exit

_phases: dict[int, list[tuple[str, str, float]]] = {}
"""Thread -> its current activities, the innermost last: side, phase, start time."""


@contextlib.contextmanager
def phase(side: str, what: str) -> Iterator[None]:
    """Declare that a side is at work in this thread.

    Args:
        side: its label, such as ``torch`` or ``first``.
        what: ``importing``, ``building``, ``running``, ``gradient``.
    """
    mine = _phases.setdefault(threading.get_ident(), [])
    mine.append((side, what, time.monotonic()))
    _leave_crumb(mine)
    try:
        yield
    finally:
        mine.pop()
        _leave_crumb(mine)
        if not mine:
            _phases.pop(threading.get_ident(), None)


def _leave_crumb(mine: list[tuple[str, str, float]]) -> None:
    if threading.current_thread() is threading.main_thread():
        breadcrumbs.note(phase=mine[-1][:2] if mine else ("", "running"))


class Watchdog:
    """Ends the process with one line on stderr when the thread that made it is in one call for too long.

    Args:
        seconds: limit for one call of one side.
        sources: label of a side -> the folder or file of its code, to distinguish the sides without a `phase`.
        option: the option that set the limit, for the message.
    """

    def __init__(self, seconds: float, sources: Mapping[str, Path] | None = None, option: str = "--timeout"):
        self.seconds, self.option = seconds, option
        self.sources = dict(sources or {})
        self.names: dict[str, str] = {}
        """Label of a side -> its name in the message; by default its label."""
        self._beside: Path | None = None
        self._there: set[Path] = set()
        self.end: Callable[[str], None] = self._end
        self._thread = threading.get_ident()
        self._root = stack.live(sys._getframe())[-1].frame
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._stderr: int | None = None
        self._call: tuple[FrameType | None, float] = (None, 0.0)

    def __enter__(self) -> Watchdog:
        with contextlib.suppress(OSError):  # user code may swallow what is written later
            self._stderr = os.dup(2)
        self._watch = threading.Thread(target=self._run, name="attn-bridge watchdog", daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._lock:  # a line that is being written is written whole
            self._call = (None, 0.0)
        self._watch.join()
        if self._stderr is not None:
            os.close(self._stderr)

    def leave_nothing_beside(self, path: Path) -> None:
        """Remove unfinished staging folders for this path at the end; folders that exist already stay."""
        self._beside = path.absolute().parent
        self._there = set(self._beside.glob(".*.part"))

    def _run(self) -> None:
        while not self._stop.wait(TICK):
            with self._lock:
                late = self._late()
            if late is not None and not self._stop.is_set():
                self.end(late)
                return

    def _late(self) -> str | None:
        """Return the line that reports a call over its limit, None if no call is."""
        # At once: a frame that returns meanwhile no longer knows who called it.
        lines = stack.live(sys._current_frames().get(self._thread))
        if not lines or lines[-1].frame is not self._root:
            return None
        phases = _phases.get(self._thread)
        side, what = phases[-1][:2] if phases else ("", "running")
        call, limit = stack.outermost_call(lines), self.seconds
        if what == IMPORTING and stack.is_in_library(lines):
            limit = max(limit, LIBRARIES)  # a framework takes its time; the user's own code is what may hang
        elif what == IMPORTING:
            call = stack.user_line(lines, self.sources)
        frame = None if call is None else call.frame
        if frame is not self._call[0]:
            self._call = (frame, time.monotonic())
        since = self._call[1] if call is not None else phases[-1][2] if phases else None
        if since is None or time.monotonic() - since < limit:
            return None
        line = stack.user_line(lines, self.sources)
        side = side or stack.side_of(call, line, self.sources)
        name, what = named_side(side, self.names), stack.doing(what, lines)
        return f"{name} has been {what} for more than {limit:g} s ({self.option}): {stack.place(line or lines[0])}"

    def _end(self, message: str) -> None:
        """Write the line, and end the process with all that it started."""
        text = f"error: {' '.join(message.split())}\n"
        with contextlib.suppress(OSError):
            os.write(2 if self._stderr is None else self._stderr, text.encode("utf-8", "replace"))
        end_children()
        if self._beside is not None:
            for folder in set(self._beside.glob(".*.part")) - self._there:
                shutil.rmtree(folder, ignore_errors=True)
        breadcrumbs.note(status=STATUS)
        _exit(STATUS)


def named_side(side: str, names: Mapping[str, str]) -> str:
    """Return the subject of a sentence about a side.

    Args:
        side: its label, "" if it is the only side.
        names: label of a side -> its name in messages.
    """
    return f"the {names.get(side) or f'{SHOWN.get(side, side)} side'}" if side else "the side"


def end_children(parent: int | None = None) -> None:
    """Kill the processes that a process started, this one by default, and those that they started."""
    for child in _children(os.getpid() if parent is None else parent):
        end_children(child)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def end_descendants(rounds: int | None = None) -> None:
    """Kill all processes below this one until none is left: one may start another between two looks.

    Those that their parents left count where this process adopts them (`adopt_orphans`).

    Args:
        rounds: most looks, 10 ms apart; None for as many as it takes.
    """
    for _ in itertools.count() if rounds is None else range(rounds):
        end_children()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def adopt_orphans() -> None:
    """Have the kernel make orphans below this process its children; without effect outside Linux."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent has ended; without effect outside Linux."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(ImportError, AttributeError):  # a Python without ctypes, a libc without prctl
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def _children(parent: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # no /proc here, or the process is gone
        for task in Path(f"/proc/{parent}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children
