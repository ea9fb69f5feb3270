"""A process that does a share: asked by a line of JSON on stdin, it says on stdout what it has done.

It ends when stdin does, since whoever started it is gone then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from ..containers.base import DiskFullError
from ..planning.tasks import cut, share
from ..requests import Request
from .jobs import Job
from .locating import place_of
from .working import Advance, work


def do_share(asked: dict[str, Any], advance: Advance) -> None:
    """Do what was asked: the share of one worker, without publishing.

    Raises:
        ValueError: the source is another one by now, or can't be read or written.
    """
    request, job = Request(**asked["request"]), Job(**asked["job"])
    with request.opened() as prepared:
        if f"{prepared.plan.identity(prepared.reader)} {prepared.format}" != job.plan:
            raise ValueError(f"{prepared.reader.path} changed while it was read; convert it again")
        place = place_of(prepared.target)
        with place.helping():
            mine = share(cut(prepared.plan, job.task_bytes), asked["index"], job.workers)
            work(prepared, place, mine, job.task_bytes, job.plan, asked["run"], advance)


def main() -> int:
    """Do what stdin asks for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it is interrupted, too
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        do_share(asked, _say)
    except Exception as error:
        text = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        print(json.dumps({"error": text, "is_full": isinstance(error, DiskFullError)}), flush=True)
        return 1
    return 0


def _say(count: int, name: str) -> None:
    print(json.dumps({"done": count, "name": name}), flush=True)


def _end_with_starter() -> None:
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
