"""What sdist and wheel hold: everything that the project's packages need, and nothing else."""

from __future__ import annotations

import email
import tarfile
import zipfile
from pathlib import Path

from .versions import ROOT

PACKAGES = ("attn_bridge", "attn_kernels", "attn_parity", "jax_attn", "torch_attn")
NEEDED = ("LICENSE", "README.md", "pyproject.toml", "CHANGELOG.md", "CITATION.cff")
"""Files of the project that the sdist holds beside its packages."""

STRANGE = ("__pycache__", ".pyc", ".so", ".venv", "parity_tests", "fault_lab", "benchmarks", ".DS_Store", "conftest.py")


def problems(wheel: Path, sdist: Path, version: str, root: Path = ROOT) -> list[str]:
    """Return what is wrong with the two archives, one line each.

    Args:
        wheel: the wheel.
        sdist: the source archive.
        version: that they must be of.
        root: of the project, whose packages they must hold.
    """
    wanted = source_files(root)
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        info = f"attn_bridge-{version}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        points = archive.read(f"{info}/entry_points.txt").decode()
    found = [f"{wheel.name} lacks {name}" for name in sorted(wanted - inside)]
    found += [f"{wheel.name} holds {name}" for name in sorted(inside - wanted) if not name.startswith(f"{info}/")]
    for key, value in (("Version", version), ("License-Expression", "Apache-2.0"), ("Requires-Python", ">=3.11")):
        if metadata[key] != value:
            found.append(f"{wheel.name} says {key}: {metadata[key]}, not {value}")
    if f"{info}/licenses/LICENSE" not in inside:
        found.append(f"{wheel.name} holds no licence")
    for point in ("attn-bridge = attn_bridge.cli:main", "attn_bridge = attn_parity.plugin"):
        if point not in points:
            found.append(f"{wheel.name} has no entry point {point}")
    if not wheel.name.endswith("-py3-none-any.whl"):
        found.append(f"{wheel.name} must be a wheel for any Python 3 and machine")

    front = f"attn_bridge-{version}/"
    with tarfile.open(sdist) as archive_of_source:
        members = {one.name: one for one in archive_of_source.getmembers()}
    names = {name.removeprefix(front) for name, one in members.items() if one.isfile()}
    found += [f"{sdist.name} lacks {name}" for name in sorted((wanted | set(NEEDED)) - names)]
    found += [f"{sdist.name} holds {name}, which is no file or folder" for name, one in sorted(members.items())
              if not (one.isfile() or one.isdir())]  # fmt: skip
    for archive_name, held in ((wheel.name, inside), (sdist.name, names)):
        found += [f"{archive_name} holds {name}" for name in sorted(held) if any(mark in name for mark in STRANGE)]
    return found


def source_files(root: Path = ROOT) -> set[str]:
    """Return the files of the packages as they lie in the project."""
    return {
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
