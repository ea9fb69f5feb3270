"""The process between a caller and a confined command: starts it, enforces its limits, and ends all that it started.

In: a `Work` as JSON on stdin. Out: an `Ending` as JSON on stdout. Run as ``python -P -m
attn_parity.confinement.keeper``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal

from ..watch import adopt_orphans, end_descendants, end_with_parent
from . import landlock

MAX_FILE = 8 << 30
"""Bytes of the largest file that a command can write: a full disk would stop others."""

KEPT = 1 << 16
"""Last bytes of the command's stderr that are kept."""

STOPPED = 128 + signal.SIGTERM
"""Status of this process when its caller ends it early."""

POLL = 0.05
"""Seconds between two looks at memory and time."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A command and its limits.

    Attributes:
        words: the command line.
        folder: the current folder.
        environment: all variables of its environment.
        writable: folders that it may write to.
        seconds: limit of time.
        memory: limit of the resident memory of its processes together, in bytes; None for unlimited.
    """

    words: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    writable: tuple[str, ...]
    seconds: float
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a command.

    Attributes:
        end: ``exit``; ``time`` or ``memory``, the limit that it exceeded; or ``stop``, the caller ended it.
        status: exit status, negative for a signal.
        errors: the end of its stderr.
    """

    end: Literal["exit", "time", "memory", "stop"]
    status: int
    errors: str


def main() -> int:
    """Run the work on stdin, and write its ending to stdout."""
    data = json.load(sys.stdin)
    work = Work(**{**data, "words": tuple(data["words"]), "writable": tuple(data["writable"])})
    end_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    try:
        json.dump(dataclasses.asdict(keep(work)), sys.stdout)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
    return 0


def keep(work: Work) -> Ending:
    """Run a command until it ends or exceeds a limit, and end all processes that it started.

    Raises:
        OSError: it can't be started.
    """
    process = subprocess.Popen(
        work.words,
        cwd=work.folder,
        env=dict(work.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: _confine(work),  # no thread is running yet
    )
    assert process.stderr is not None, "it is a pipe"
    tail = _Tail(process.stderr)
    end: Literal["exit", "time", "memory"] = "exit"
    deadline = time.monotonic() + work.seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            end = "time"
        elif work.memory is not None and _resident(os.getpid()) > work.memory:
            end = "memory"
        if end != "exit":
            break
        time.sleep(POLL)
    end_descendants()
    status = process.wait()
    return Ending(end, status, tail.text())


def _confine(work: Work) -> None:
    """Limit this process, which becomes the command."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = MAX_FILE if most < 0 else min(MAX_FILE, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if landlock.version():
        landlock.restrict(work.writable)


class _Tail:
    """Reads a stream to its end, and keeps the last bytes."""

    def __init__(self, stream: IO[bytes]):
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        while chunk := os.read(stream.fileno(), KEPT):
            self._kept = (self._kept + chunk)[-KEPT:]

    def text(self) -> str:
        """Return the last bytes as text; every writer has ended."""
        self._thread.join(5)
        return self._kept.decode("utf-8", "replace")


def _resident(parent: int) -> int:
    """Return the resident memory of the processes below one, in bytes."""
    total = 0
    for child in _children(parent):
        with contextlib.suppress(OSError, ValueError, IndexError), Path(f"/proc/{child}/statm").open() as stream:
            total += int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        total += _resident(child)
    return total


def _children(parent: int) -> list[int]:
    with contextlib.suppress(OSError, ValueError), Path(f"/proc/{parent}/task/{parent}/children").open() as stream:
        return [int(word) for word in stream.read().split()]
    return []


if __name__ == "__main__":
    sys.exit(main())
