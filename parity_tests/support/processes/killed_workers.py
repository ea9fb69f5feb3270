"""Conversions by workers that are killed at a moment: each time that something is written, noted or renamed is one.

    python -m parity_tests.support.processes.killed_workers PLACE KIND

kills the n-th moment of a conversion of ``PLACE/source`` for every n in turn, and resumes each. What was interrupted
never stands at the target, and what is resumed has the bytes of ``PLACE/whole``. KIND is what is killed: one of two
``worker`` processes, the ``parent`` of processes, a process ``alone``, or the ``finisher``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from attn_bridge import checkpoints
from attn_bridge.checkpoints import accompanying
from attn_bridge.checkpoints.containers.safetensors import SafetensorsWriter
from attn_bridge.checkpoints.workers.places import local
from attn_bridge.checkpoints.workers.places.local import LocalPlace

from .forks import in_a_process

TASK = 4096


def die_at(moment: int) -> None:
    """Have this process kill itself when so many things were written, noted or renamed."""
    seen = 0

    def counted(home: Any, name: str) -> None:
        method = getattr(home, name)

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments, **named)

        setattr(home, name, call)

    for home, names in (
        (SafetensorsWriter, ("write_range", "flush", "finish")),
        (LocalPlace, ("begin", "record", "publish", "clear")),
        (local, ("put",)),
        (accompanying, ("put",)),
        (shutil, ("rmtree",)),
        (Path, ("replace",)),
    ):
        for name in names:
            counted(home, name)


def tree(path: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def main(place: Path, kind: str) -> int:
    """Kill at every moment in turn, and return how many there were."""
    source, target, wanted = place / "source", place / "x", tree(place / "whole")

    def share(index: int, workers: int = 2, **options: Any) -> None:
        checkpoints.convert_share(source, target, index, workers, task_bytes=TASK, **options)

    checkpoints.convert(source, place / "warm")  # so that no fork has to import and to detect the same again
    for moment in range(1, 1000):
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(target.with_name(".x.partial"), ignore_errors=True)

        def killed(moment: int = moment) -> None:
            if kind == "finisher":
                die_at(moment)
                checkpoints.finish(source, target)
            elif kind == "worker":
                die_at(moment)
                share(1)
            else:
                die_at(moment)
                checkpoints.convert(source, target, workers=1, task_bytes=None if kind == "alone" else TASK)

        if kind == "finisher":  # all is written, but for what a worker notes last
            shutil.copytree(place / "written", target.with_name(".x.partial"))
        elif kind == "worker":
            assert not in_a_process(lambda: share(0))
        status = in_a_process(killed)
        assert status in (0, -signal.SIGKILL), status
        assert not target.exists() or tree(target) == wanted, f"something stands there after moment {moment}"
        if status != -signal.SIGKILL:
            assert target.exists()
            return moment - 1
        again = {
            "finisher": lambda: checkpoints.finish(source, target),
            "worker": lambda moment=moment: share(1) if moment % 2 else [share(n, 3, resume=True) for n in (2, 0, 1)],
            "alone": lambda: checkpoints.convert(source, target, resume=True, overwrite=True),
            "parent": lambda: checkpoints.convert(
                source, target, workers=1, task_bytes=TASK, resume=True, overwrite=True
            ),
        }[kind]
        assert not in_a_process(again), f"not resumed after moment {moment}"
        assert tree(target) == wanted, f"other bytes after moment {moment}"
        assert not target.with_name(".x.partial").exists()
    raise AssertionError("it never came to its end")


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2]))
