"""Empty environments: the wheel is installed with each extra, and must do there what that extra promises."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .versions import ROOT

FASTEST, RUNS = 0.1, 5
"""Seconds that `import attn_bridge` may take, of the fastest of so many runs."""

_ATTENTION = "import {package} as a; assert a.__all__; import sys; assert '{other}' not in sys.modules"
EXTRAS: dict[str, tuple[Sequence[str], ...]] = {
    "": (
        ("attn-bridge", "--version"),
        ("attn-bridge", "doctor"),
        ("python", "-c", "import attn_bridge.checkpoints, attn_bridge.parity, attn_bridge.specs, attn_bridge.masks"),
    ),
    "torch": (("python", "-c", _ATTENTION.format(package="torch_attn", other="jax")), ("attn-bridge", "doctor")),
    "jax": (("python", "-c", _ATTENTION.format(package="jax_attn", other="torch")), ("attn-bridge", "doctor")),
    "cpu": (("python", "-c", "import attn_kernels, llvmlite"),),
    "remote": (("python", "-c", "import fsspec, s3fs"),),
    "ray": (("python", "-c", "import ray"),),
    "hub": (("python", "-c", "import huggingface_hub; from attn_bridge.checkpoints import push_to_hub"),),
    "viz": (("python", "-c", "import matplotlib; import attn_bridge.viz"),),
    "gguf": (("python", "-c", "import gguf; gguf.dequantize"),),
    "keras": (("python", "-c", "import h5py; h5py.h5d"),),
    "attest": (("python", "-c", "import cryptography; from attn_parity.attestation import envelope"),),
    "sigstore": (
        ("python", "-c", "import sigstore.sign, sigstore.verify; from attn_parity.attestation import keyless"),
    ),
    "mcp": (("python", "-c", "import mcp.server; from attn_parity.agents import server"),),
    "all": (("attn-bridge", "doctor"), ("attn-bridge", "check")),
}
"""Extra -> commands that must succeed where it is installed."""


@dataclasses.dataclass(frozen=True)
class Installed:
    """What became of one environment.

    Attributes:
        python: version asked for.
        extra: "" for none.
        seconds: time that installing and the commands took.
        imported: seconds of ``import attn_bridge``.
        said: last line of the last command.
        problem: the command that failed, and its last lines; "" where none did.
    """

    python: str
    extra: str
    seconds: float
    imported: float
    said: str
    problem: str = ""


def interpreter(version: str) -> str | None:
    """Return a Python of a version, ``3.12``; None where this machine has none."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [one / "bin" / "python" for one in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    on_path = shutil.which(f"python{version}")
    for one in (*found, *([on_path] if on_path else [])):
        said = subprocess.run([one, "--version"], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.startswith(f"Python {version}."):
            return str(one)
    return None


def install(wheel: Path, python: str, extra: str, folder: Path, constraints: Path | None = None) -> Installed:
    """Install a wheel in a new environment, run what its extra promises, and remove the environment again.

    Args:
        wheel: to install.
        python: version of Python, which this machine must have.
        extra: to install; "" for none.
        folder: for the environment; it must not exist.
        constraints: versions to install; None takes the newest that the wheel allows.
    """
    started = time.perf_counter()
    chosen = interpreter(python)
    if chosen is None:
        return Installed(python, extra, 0.0, 0.0, "", f"there is no Python {python} here")
    binaries = folder / "bin"
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    pinned = ["-c", str(constraints)] if constraints else []
    pip = [str(binaries / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *pinned, what]
    imported, said = 0.0, ""
    try:
        for command in ([chosen, "-m", "venv", str(folder)], pip):
            problem, said = _run(command, folder.parent)
            if problem:
                return Installed(python, extra, time.perf_counter() - started, 0.0, said, problem)
        imported = import_time(binaries / "python")
        if imported > FASTEST:
            problem = f"import attn_bridge takes {imported:.3f} s; at most {FASTEST} s"
        for command in (*EXTRAS[extra], ("python", "-m", "pip", "check")):
            if problem:
                break
            problem, last = _run([str(binaries / command[0]), *command[1:]], folder.parent)
            said = said if command[-2:] == ("pip", "check") or not last else last
        return Installed(python, extra, time.perf_counter() - started, imported, said, problem)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def import_time(python: Path) -> float:
    """Return how many seconds an interpreter takes to import attn_bridge, of several runs the fastest."""
    times = []
    for _ in range(RUNS):
        done = subprocess.run(
            [python, "-I", "-X", "importtime", "-c", "import attn_bridge"], capture_output=True, text=True, check=True
        )
        found = re.search(r"\|\s*([0-9]+) \| attn_bridge$", done.stderr, re.MULTILINE)
        if found is None:
            raise ValueError("python -X importtime does not name attn_bridge")
        times.append(int(found.group(1)) / 1e6)
    return min(times)


def _run(command: Sequence[str], folder: Path) -> tuple[str, str]:
    """Run a command away from the project, which must not be what it imports; return the problem and its last line."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    said = lines[-1] if lines else ""
    if done.returncode == 0:
        return "", said
    tail = " / ".join([*lines[-5:], *done.stderr.strip().splitlines()[-5:]])
    return f"{' '.join(map(str, command))}: status {done.returncode}: {tail}", said


CONSTRAINTS = ROOT / "constraints.txt"
