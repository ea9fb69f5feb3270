"""Isolate user code in commands: whatever it prints, raises or changes, the command prints its own result."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from ...factories import guarded, intact_builtins, workspace
from ...watch import Watchdog, end_children
from . import supervision

GRACE = 5.0
"""Seconds that exit handlers of user code may take; those of multiprocessing wait for processes that it left."""

_exit = os._exit
_null: TextIO | None = None
_has_run = False


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Enter the context in which user code is imported and run.

    Output of user code or a framework, also from C++ or a child process, is discarded, and stdin is empty. The path,
    the arguments and the current folder are restored at the end. Exceptions beyond ordinary errors become one line, and
    so does ``os._exit``, which would end the command with success.
    """
    global _has_run
    _has_run = True
    folder = Path.cwd()
    try:
        with _silence(), workspace(), _no_way_out(), intact_builtins("your code", everything=True):
            try:
                yield
            except (ValueError, TypeError, OSError, ImportError, KeyboardInterrupt):
                raise
            except BaseException:
                with guarded(what):
                    raise
    finally:
        supervision.end_started()  # before a report is shown: a browser that `--open` starts goes on
        os.chdir(folder)


@contextlib.contextmanager
def watched(seconds: float | None, sources: Mapping[str, Path] | None = None) -> Iterator[Watchdog | None]:
    """Enter a context that limits the duration of each call of user code, in seconds; None for unlimited."""
    if seconds is None:
        yield None
        return
    with Watchdog(seconds, sources) as dog:
        yield dog


@contextlib.contextmanager
def _no_way_out() -> Iterator[None]:
    """Let ``os._exit`` raise in this process; a process that was forked from it ends as it means to."""
    mine, real = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        if os.getpid() == mine:
            raise SystemExit(f"os._exit({status})")
        real(status)

    homes = [module for name in ("os", "posix", "nt") if (module := sys.modules.get(name)) is not None]

    def put(end: Callable[[int], NoReturn]) -> None:
        for module in homes:
            module._exit = end  # type: ignore[attr-defined]  # a module has no type for it

    put(leave)
    try:
        yield
    finally:
        put(real)


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
    """Return one stream for the whole process, since a logger that was set up inside continues to write to it."""
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


def end(status: int) -> NoReturn:
    """End the process with an exit status that user code left running can neither change nor delay for long.

    Exit handlers run, and files that are open are flushed; threads that are not daemons are not waited for, and exit
    handlers for `GRACE` seconds at most.
    """
    supervision.finish(status)
    hush()
    if not _has_run:
        raise SystemExit(status)
    guard = threading.Timer(GRACE, _leave, (status,))
    guard.daemon = True
    guard.start()
    if all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        raise SystemExit(status)  # not sys.exit, which user code may have replaced
    with _no_way_out():
        atexit._run_exitfuncs()
    gc.unfreeze()  # the objects of the start are listed too
    for stream in gc.get_objects():
        if issubclass(type(stream), io.IOBase):
            with contextlib.suppress(Exception):
                stream.flush()
    _exit(status)


def _leave(status: int) -> None:
    """End the children and then this process, without exit handlers: those take longer than `GRACE`."""
    end_children()
    _exit(status)
