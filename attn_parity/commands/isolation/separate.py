"""``compare --separate``: run each side in a separate process, and if needed in a separate environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from attn_bridge.weights import Rules

from ...command_line import words

if TYPE_CHECKING:
    from ...results.report import Report

TAKEN = ("--inputs", "--shape", "--fixed", "--vary", "--seeds", "--first-seed", "--mode", "--dtype")
"""Options for dumping the first side; the second side is dumped the same way."""

COMMON = ("--build-seed", "--timeout", "--output")
"""Options that both sides are dumped with."""


def run_separately(
    first: str, second: str, devices: tuple[str, str] | None, options: Mapping[str, Any], command: str
) -> Report:
    """Dump both sides, each with its own Python, and judge the dumps.

    Args:
        first: factory of the first side.
        second: factory of the second side.
        devices: kinds of device, None for where the sides are.
        options: the options of `compare` by name.
        command: the command that runs it again.

    Raises:
        ValueError: a side can't be dumped; the message is that of its process.
    """
    from ...dumps import replay

    rules = None if options["--rules"] is None else Rules.from_toml(options["--rules"])
    with _ended_by_signals(), tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "first", Path(folder) / "second"
        shared_options = {name: options[name] for name in (*TAKEN, *COMMON)} | {"--device": devices and devices[0]}
        _dump("first", options["--first-python"], first, ours, shared_options)
        shared_options = {name: options[name] for name in ("--rules", "--no-transfer", *COMMON)}
        shared_options |= {"--device": devices and devices[1], "--like": ours, "--inputs": options["--second-inputs"]}
        _dump("second", options["--second-python"], second, theirs, shared_options)
        return replay.compare_dumps(ours, theirs, rules=rules, command=command)


def _dump(side: str, python: str | None, factory: str, out: Path, options: Mapping[str, object]) -> None:
    program = sys.executable if python is None else shutil.which(python)
    if program is None:
        raise ValueError(f"--{side}-python {python} is no program")
    arguments = [program, "-m", "attn_bridge", "dump", factory, str(out), *words(options)]
    try:
        # A session of its own: what the side starts can be ended with it.
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(f"--{side}-python {python} cannot be run: {error.strerror}") from error
    try:
        _, errors = process.communicate()
    finally:
        with contextlib.suppress(OSError):  # the whole session has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = (errors.strip().splitlines() or [f"its process ended with status {process.returncode}"])[-1]
        last = last.removeprefix("error: ")
        about = last.removeprefix("the side ")
        raise ValueError(f"the {side} side {about}" if about != last else f"{side} side: {last}")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that no process and no folder is left behind."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        former = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
