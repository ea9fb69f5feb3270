"""Run a command of this package under a keeper, with a clean environment."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from attn_bridge.printable import printable, visible

from . import landlock
from .keeper import POLL, Ending, Work

PASSED = re.compile(
    "PATH|LANG|LC_.*|TZ|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|CUDA_.*|NVIDIA_.*|XLA_FLAGS|JAX_PLATFORMS|"
    "OMP_.*|MKL_.*|OPENBLAS_.*|KMP_.*"
)
"""Variables that confined code gets; tokens and passwords are in others."""

MAX_REPORT = 1 << 29
"""Bytes of the largest report that is read."""

MAX_LINE = 2_000
"""Characters of a command's error line."""


def run(
    arguments: Sequence[str],
    folder: Path,
    scratch: Path,
    *,
    writable: Iterable[Path] = (),
    avoid: Path | None = None,
    seconds: float,
    memory: int | None = None,
    stop: threading.Event | None = None,
) -> Ending:
    """Run ``attn-bridge`` with some arguments in a confined process, and return how it ended.

    Args:
        arguments: the words of the command.
        folder: the current folder.
        scratch: an existing folder for its home and temporary files, which it may write to.
        writable: further folders that it may write to.
        avoid: a folder whose code must not be imported: entries of the path in it are left out.
        seconds: limit of time.
        memory: limit of resident memory, in bytes.
        stop: an event that ends the process, and all that it started, when another thread sets it.

    Raises:
        OSError: the process can't be started.
    """
    # -P: a folder in the current one that is named like a package of the judge is not taken for it.
    words = (sys.executable, "-P", "-m", "attn_bridge", *arguments)
    own = environment(scratch, avoid)
    folders = tuple(str(path) for path in (scratch, *writable))
    work = Work(words, str(folder), own, folders, seconds, memory)
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "attn_parity.confinement.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own,
        cwd=scratch,
        start_new_session=True,
    )
    with keeper:
        output, errors = _ended(keeper, json.dumps(dataclasses.asdict(work)), stop)
    if stop is not None and stop.is_set():
        return Ending("stop", keeper.returncode, "")
    try:
        return Ending(**json.loads(output))
    except (ValueError, TypeError):
        last = (errors.strip().splitlines() or [f"status {keeper.returncode}"])[-1]
        raise OSError(f"the process can't be started: {printable(last, MAX_LINE)}") from None


def _ended(keeper: subprocess.Popen[str], work: str, stop: threading.Event | None) -> tuple[str, str]:
    """Return the output and the errors of a keeper, which is asked to end when `stop` is set."""
    text: str | None = work
    while stop is not None:
        try:
            return keeper.communicate(text, timeout=POLL)
        except subprocess.TimeoutExpired:
            text = None  # it has been sent, or goes on being sent
            if stop.is_set():
                keeper.terminate()
                break
    return keeper.communicate(text)


def environment(scratch: Path, avoid: Path | None = None) -> dict[str, str]:
    """Return the environment of a confined command: home and temporary files are in `scratch`, without secrets."""
    variables = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
    home = scratch / "home"
    for path in (home, scratch / "tmp"):
        path.mkdir(parents=True, exist_ok=True)
    variables |= {"HOME": str(home), "TMPDIR": str(scratch / "tmp"), "XDG_CACHE_HOME": str(home / ".cache")}
    # A fixed order of sets, and no files next to the sources.
    variables |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(_path(avoid))}
    if landlock.version():  # read only, so that no code can leave programs there for others
        cache = {name: value for name, value in os.environ.items() if name.startswith(CACHE)}
        variables |= cache
    return variables


CACHE = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
"""Beginnings of the variables of JAX's cache of compiled programs."""


def _path(avoid: Path | None) -> list[str]:
    """Return the entries of PYTHONPATH, and the folder of this package."""
    own = Path(__file__).resolve().parents[2]
    entries = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [entry.resolve() for entry in entries if entry.is_absolute()]
    kept = [entry for entry in entries if entry != own and (avoid is None or not entry.is_relative_to(avoid))]
    installed = any(part in ("site-packages", "dist-packages") for part in own.parts)
    return [str(entry) for entry in (kept if installed else [own, *kept])]


def content(path: Path) -> str:
    """Return the text of a file that confined code wrote: no link, no device, of bounded size; "" for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_REPORT:
            return ""
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            return stream.read(MAX_REPORT).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def error_line(ending: Ending, seconds: float, memory: int | None = None) -> str:
    """Return one line on a command that gave no result."""
    if ending.end == "time":
        return f"took longer than {seconds:g} s"
    if ending.end == "stop":
        return "was cancelled"
    if ending.end == "memory":
        return f"needed more than {(memory or 0) / (1 << 30):g} GiB of memory"
    lines = [line for line in ending.errors.splitlines() if line.startswith("error: ")]
    if not lines:
        return f"its process ended without a result (status {ending.status})"
    return printable(" ".join(visible(lines[-1].removeprefix("error: ")).split()), MAX_LINE)
