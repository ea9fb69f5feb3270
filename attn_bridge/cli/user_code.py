"""Commands that run a user's code: whatever it prints, raises or changes, the command says its one thing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..parity.factories import guarded, workspace

_null: TextIO | None = None
_has_run = False


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Hold the context in which user code is imported and run.

    What it or a framework prints, also from C++ or in a child process, is swallowed, and it has no input to wait for.
    The path, the arguments and the current folder are put back. What it raises beyond ordinary errors is one line.
    """
    global _has_run
    _has_run = True
    here = Path.cwd()
    try:
        with _silence(), workspace():
            try:
                yield
            except (ValueError, TypeError, OSError, ImportError, KeyboardInterrupt):
                raise
            except BaseException:
                with guarded(what):
                    raise
    finally:
        os.chdir(here)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    streams = sys.stdin, sys.stdout, sys.stderr
    for stream in streams[1:]:
        if stream is not None:
            stream.flush()
    null = _null_stream()
    saved = {}
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):  # closed from the start
            saved[descriptor] = os.dup(descriptor)
            os.dup2(null.fileno(), descriptor)
    sys.stdin = sys.stdout = sys.stderr = null
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)


def _null_stream() -> TextIO:
    """Return one stream for the whole process: a logger that was set up inside goes on writing to it."""
    global _null
    if _null is None or _null.closed:
        descriptor = os.open(os.devnull, os.O_RDWR)
        _null = open(descriptor, "r+", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    return _null


def hush() -> None:
    """Swallow all further output if user code was run: its threads and exit handlers have nothing to add."""
    if not _has_run:
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            os.dup2(_null_stream().fileno(), descriptor)
