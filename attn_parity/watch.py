"""Watches over user code that may never come back: names the side, the phase and the line, and ends the process.

Whoever runs a side says so with `phase`. Where nobody said, what runs is read off the stack: a call of a room of
`frameworks` is one side's, and a call of the framework's backward pass is its gradient.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

STATUS = 2
"""Exit status of a process that is ended."""

TICK = 0.1
"""Seconds between two looks."""

IMPORTING = "importing"

LIBRARIES = 120.0
"""Seconds that a library may take to be imported, whatever the limit is."""

_ROOT = Path(__file__).resolve().parents[1]
_OWN = ("attn_bridge", "attn_kernels", "attn_parity", "fault_lab", "jax_attn", "torch_attn")
_BACKWARD = (("torch/autograd", "backward"), ("torch/autograd", "grad"), ("jax/_src", "backward_pass"))
_ROOMS = {("attn_parity", "frameworks", "torch"): "torch", ("attn_parity", "frameworks", "jax"): "flax"}
"""Folders of the rooms of frameworks -> label of the side that they run."""
_exit = os._exit

_phases: dict[int, list[tuple[str, str, float]]] = {}
"""Thread -> what it is doing, the innermost last: side, phase, since when."""


@contextlib.contextmanager
def phase(side: str, what: str) -> Iterator[None]:
    """Say that a side is at work in this thread.

    Args:
        side: its label, such as ``torch`` or ``first``.
        what: ``importing``, ``building``, ``running``, ``gradient``.
    """
    mine = _phases.setdefault(threading.get_ident(), [])
    mine.append((side, what, time.monotonic()))
    try:
        yield
    finally:
        mine.pop()
        if not mine:
            _phases.pop(threading.get_ident(), None)


class Watchdog:
    """Ends the process with one line on stderr when the thread that made it is in one call for too long.

    Args:
        seconds: how long one call of one side may take.
        sources: label of a side -> the folder or file of its code, to tell the sides apart where nobody said.
        option: how the limit was given, for the message.
    """

    def __init__(self, seconds: float, sources: Mapping[str, Path] | None = None, option: str = "--timeout"):
        self.seconds, self.option = seconds, option
        self.sources = dict(sources or {})
        self.names: dict[str, str] = {}
        """Label of a side -> what the message calls it; any other is called by its label."""
        self._beside: Path | None = None
        self._there: set[Path] = set()
        self.end: Callable[[str], None] = self._end
        self._thread = threading.get_ident()
        self._root = list(_outwards(sys._getframe()))[-1]
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
        """Remove at the end what is being written for this path now: staging folders that are not there yet."""
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
        """Return the line that says what takes too long, None if nothing does."""
        # At once: a frame that returns meanwhile no longer knows who called it.
        frames = list(_outwards(sys._current_frames().get(self._thread)))
        if not frames or frames[-1] is not self._root:
            return None
        said = _phases.get(self._thread)
        side, what = said[-1][:2] if said else ("", "running")
        call, limit = _outermost_call(frames), self.seconds
        if what == IMPORTING and _is_in_library(frames):
            limit = max(limit, LIBRARIES)  # a framework takes its time; the user's own code is what may hang
        elif what == IMPORTING:
            call = _user_frame(frames, self.sources)
        if call is not self._call[0]:
            self._call = (call, time.monotonic())
        since = self._call[1] if call is not None else said[-1][2] if said else None
        if since is None or time.monotonic() - since < limit:
            return None
        line = _user_frame(frames, self.sources)
        side = side or self._side(call, line)
        what = _what(frames) if what == "running" else what
        name = f"the {self.names.get(side) or f'{side} side'}" if side else "the side"
        where = f": {_place(line or frames[0])}"
        return f"{name} has been {_doing(what)} for more than {limit:g} s ({self.option}){where}"

    def _side(self, call: FrameType | None, line: FrameType | None) -> str:
        file = Path(line.f_code.co_filename) if line is not None else None
        for label, source in self.sources.items():
            if label and file is not None and file.is_relative_to(source):
                return label
        return _framework(call.f_code.co_filename) if call is not None else ""

    def _end(self, message: str) -> None:
        """Write the line, and end the process with all that it started."""
        text = f"error: {' '.join(message.split())}\n"
        with contextlib.suppress(OSError):
            os.write(2 if self._stderr is None else self._stderr, text.encode("utf-8", "replace"))
        end_children()
        if self._beside is not None:
            for folder in set(self._beside.glob(".*.part")) - self._there:
                shutil.rmtree(folder, ignore_errors=True)
        _exit(STATUS)


def end_children(parent: int | None = None) -> None:
    """Kill the processes that a process started, this one by default, and those that they started."""
    for child in _children(os.getpid() if parent is None else parent):
        end_children(child)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def _children(parent: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # no /proc here, or the process is gone
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


# ---- reading the stack


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _outermost_call(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the outermost frame in a room of `frameworks`: the one call that is under way."""
    return next((one for one in reversed(frames) if _framework(one.f_code.co_filename)), None)


def _framework(file: str) -> str:
    """Return the label of the side whose room a file is in, "" if it is in none."""
    parts = Path(file).parts
    runs = {parts[start : start + 3] for start in range(len(parts))}
    return next((name for room, name in _ROOMS.items() if room in runs), "")


def _user_frame(frames: Sequence[FrameType], sources: Mapping[str, Path]) -> FrameType | None:
    """Return the innermost frame of the user's own code; of any code but ours and installed one, if there is none."""
    ours = (place for place, one in enumerate(frames) if _is_ours(one.f_code.co_filename))
    frames = frames[: next(ours, len(frames))]  # what called us is not what we called
    for one in frames:
        if any(_is_below(one.f_code.co_filename, source) for source in sources.values()):
            return one
    return next((one for one in frames if not _is_installed(one.f_code.co_filename)), None)


def _is_in_library(frames: Sequence[FrameType]) -> bool:
    """Tell whether what runs is a library that is being imported, and not the code that imports it."""
    library = Path(os.__file__).resolve().parent
    files = [Path(one.f_code.co_filename) for one in frames if not one.f_code.co_filename.startswith("<")]
    inner = next((one for one in files if "site-packages" in one.parts or not one.is_relative_to(library)), None)
    return inner is not None and _is_installed(str(inner))


def _is_ours(file: str) -> bool:
    return any(_is_below(file, _ROOT / package) for package in ("attn_bridge", "attn_parity", "fault_lab"))


def _is_below(file: str, source: Path) -> bool:
    return Path(file).is_relative_to(source)


def _is_installed(file: str) -> bool:
    if file.startswith("<"):
        return True
    path = Path(file)
    library = Path(os.__file__).resolve().parent
    is_own = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _OWN
    return is_own or path.is_relative_to(library) or "site-packages" in path.parts


def _what(frames: Sequence[FrameType]) -> str:
    """Tell a backward pass from a forward one."""
    for one in frames:
        file = Path(one.f_code.co_filename).as_posix()
        if any(part in file and one.f_code.co_name == name for part, name in _BACKWARD):
            return "gradient"
    return "running"


def _doing(what: str) -> str:
    return {"gradient": "computing its gradient"}.get(what, what)


def _place(frame: FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, number).strip()
    with contextlib.suppress(ValueError):
        file = Path(file).relative_to(Path.cwd()).as_posix()
    return f"{file}:{number} in {frame.f_code.co_name}" + (f": {source}" if source else "")
