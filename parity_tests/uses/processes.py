"""Run each use in a process of its own, which ends with its time limit: a use that hangs or crashes is a row, too."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from .table import ABSENT, FAILS, outcome


def rows(sides: tuple[str, ...], seconds: float, report: Callable[[str], object]) -> list[tuple[str, ...]]:
    """Return each use with its outcome on every side.

    Args:
        sides: names of modules with a table `USES` each.
        seconds: limit of time of a use, from the start of its process.
        report: called with a line per use that has ended.
    """
    tables = [importlib.import_module(side).USES for side in sides]
    context = _processes(sides)
    names = list({name: None for table in tables for name in table})
    cells: dict[tuple[str, str], str] = {}
    for number, name in enumerate(names, 1):
        for side, table in zip(sides, tables, strict=True):
            use, start = table.get(name, ABSENT), time.monotonic()
            cells[name, side] = outcome(use) if isinstance(use, str) else run(side, name, seconds, context)
            if not isinstance(use, str):
                short, took = side.rpartition(".")[2], time.monotonic() - start
                report(f"[{number}/{len(names)}] {short}: {name}: {cells[name, side][:80]} ({took:.1f} s)")
    return [(name, *(cells[name, side] for side in sides)) for name in names]


def run(side: str, name: str, seconds: float, context: multiprocessing.context.BaseContext | None = None) -> str:
    """Return the outcome of a use, run in a process of its own."""
    context = context or _processes((side,))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(side, name, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(seconds) else f"{FAILS}: ran past {seconds:g} s"
    except EOFError:
        process.join(seconds)
        result = f"{FAILS}: its process ended with status {process.exitcode}"
    _end(process)
    return str(result)


def _processes(sides: tuple[str, ...]) -> multiprocessing.context.BaseContext:
    """Return how processes are started: as copies of one that has imported the sides and run nothing, where there are.

    Copies of a process that has computed would miss the threads of its libraries, and hang.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(sides))
    return context


def _send_outcome(side: str, name: str, sender: Connection) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # what the use starts ends with it
    sender.send(outcome(importlib.import_module(side).USES[name]))


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process and all that it started."""
    process.join(0.5)  # it may be about to end by itself
    if hasattr(os, "killpg") and process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
