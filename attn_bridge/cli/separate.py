"""``compare --separate``: each side in a process, and if need be an environment, of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..weights import Rules

if TYPE_CHECKING:
    from ..parity.compare.report import Report

TAKEN = ("--inputs", "--shape", "--seeds", "--first-seed", "--mode", "--dtype")
"""Options that say how the torch side is dumped; the Flax side is dumped like it."""


def run_separately(
    torch: str, flax: str, devices: tuple[str, str] | None, options: Mapping[str, Any], command: str
) -> Report:
    """Dump both sides, each with its own Python, and judge the dumps.

    Args:
        torch: factory of the torch side.
        flax: factory of the Flax side.
        devices: kinds of device, None for where the modules are.
        options: the options of `compare` by name.
        command: the command that runs it again.

    Raises:
        ValueError: a side can't be dumped; the message is that of its process.
    """
    from ..parity.dumps import replay

    rules = None if options["--rules"] is None else Rules.from_toml(options["--rules"])
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "torch", Path(folder) / "flax"
        first = {name: options[name] for name in TAKEN} | {"--device": devices and devices[0]}
        _dump("torch", options["--torch-python"], torch, ours, first)
        names = ("--rules", "--no-transfer")
        second = {name: options[name] for name in names} | {"--device": devices and devices[1]}
        second |= {"--like": ours, "--inputs": options["--flax-inputs"]}
        _dump("flax", options["--flax-python"], flax, theirs, second)
        return replay.compare_dumps(ours, theirs, rules=rules, command=command)


def _dump(side: str, python: str | None, factory: str, out: Path, options: Mapping[str, Any]) -> None:
    program = sys.executable if python is None else shutil.which(python)
    if program is None:
        raise ValueError(f"--{side}-python {python} is no program")
    from .compare import words

    arguments = [program, "-m", "attn_bridge", "dump", factory, str(out), *words(options)]
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise ValueError(f"--{side}-python {python} cannot be run: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
        raise ValueError(f"{side} side: {last.removeprefix('error: ')}")
