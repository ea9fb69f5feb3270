"""A process that does a share: it says in lines of JSON what it has done.

It ends with the pipe that its share comes through: the process that started it is gone then.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TextIO

from ... import copying
from ...containers.base import CheckpointError, DiskFullError
from ...requests import Prepared, Request
from ..jobs import Job, cut, share
from ..places import place_of
from ..working import Advance, work


def do_share(asked: dict[str, Any], advance: Advance) -> None:
    """Do what was asked: the share of one worker, without publishing.

    Raises:
        ValueError: the source is another one by now, or can't be read or written.
    """
    with Request(**asked["request"]).opened() as prepared:
        do_share_of(prepared, prepared.identity(), asked, advance)


def do_share_of(prepared: Prepared, identity: str, asked: dict[str, Any], advance: Advance) -> None:
    """Do what was asked of a conversion that is open, and had that identity when it was opened.

    Raises:
        ValueError: the source is another one than whoever asked had, or can't be read or written.
    """
    job = Job(**asked["job"])
    if identity != job.plan:
        raise CheckpointError(f"{prepared.reader.path} changed while it was read; convert it again")
    write_share(prepared, job, asked["run"], asked["index"], advance)


def write_share(prepared: Prepared, job: Job, run: str, index: int, advance: Advance) -> None:
    """Do the share of one worker of a run."""
    place = place_of(prepared.target)
    with place.helping(job), copying.beside(job.workers):
        mine = share(cut(prepared.plan, job.task_bytes, job.workers), index, job.workers)
        work(prepared, place, mine, job, run, advance)


def report(work: Callable[[Advance], None], lines: TextIO) -> int:
    """Do something, say in lines of JSON how far it is or what it failed with, and return the exit status."""

    def say(count: int, name: str) -> None:
        print(json.dumps({"done": count, "name": name}), file=lines, flush=True)

    try:
        work(say)
    except Exception as error:  # whoever started this process says it in its place
        text = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        print(json.dumps({"error": text, "is_full": isinstance(error, DiskFullError)}), file=lines, flush=True)
        return 1
    return 0


def read_line(pipe: int) -> dict[str, Any] | None:
    """Return what the next line of JSON in a pipe says, or None where the pipe ends before."""
    with open(pipe, "rb", buffering=0, closefd=False) as lines:  # nothing of what follows is taken
        line = lines.readline()
    said: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return said


def end_with(pipe: int) -> queue.SimpleQueue[dict[str, Any]]:
    """End this process when a pipe does, whose other end is held by whoever started it; return what it says till then.

    Each line of it is JSON.
    """
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        while (said := read_line(pipe)) is not None:
            heard.put(said)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    return heard


def work_and_report(work: Callable[[Advance], None], pipe: int, lines: TextIO) -> int:
    """Do something until a pipe ends, say how far it is or what it failed with, and return the exit status."""
    end_with(pipe)
    return report(work, lines)
