"""The command line of a release; every step prints a line, and the first that fails ends it with status 1."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import archives, changelog, contents, environments, versions
from .versions import ROOT

DIST, SBOM = ROOT / "dist", ROOT / "sbom"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--tag", help="tag of the commit, which must be v and the version")
    parser.add_argument("--notes", metavar="FILE", help="write the version's section of the changelog to a file")
    parser.add_argument("--install", nargs="*", metavar="VERSION", help="Pythons to install it on; all three if none")
    parser.add_argument("--extra", action="append", metavar="NAME", help="an extra, '' for none; default: each")
    parser.add_argument("--pinned", action="store_true", help="install the versions of constraints.txt")
    parser.add_argument("--sbom", metavar="PYTHON", help="write the bill of materials of this Python's environment")
    commands = parser.add_subparsers(dest="command", metavar="bump")
    bump = commands.add_parser("bump", help="put a new version everywhere")
    bump.add_argument("version")
    given = parser.parse_args(arguments)
    try:
        if given.command == "bump":
            versions.bump(given.version)
            print(f"{given.version}: commit it, and tag it v{given.version}")
            return 0
        return release(given)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def release(given: argparse.Namespace) -> int:
    """Build, check, install; return the exit status."""
    version = versions.current()
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    problems = versions.problems(tag=given.tag)
    problems += changelog.problems(text, version if given.tag else None)
    if not _said("version and changelog", problems):
        return 1
    if given.notes:
        Path(given.notes).write_text(changelog.section(text, version), encoding="utf-8")
    wheel, sdist = build(version)
    twine = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    if not _said("twine check", _output(twine)) or not _said("contents", contents.problems(wheel, sdist, version)):
        return 1
    for one in (sdist, wheel):
        print(f"  {one.relative_to(ROOT)}  {one.stat().st_size:,} bytes  sha256 {_sha256(one)}")
    if given.sbom and not _said("bill of materials", write_sbom(Path(given.sbom), version)):
        return 1
    return 0 if given.install is None else installed(given, wheel)


def build(version: str) -> tuple[Path, Path]:
    """Build sdist, and the wheel from it, and return wheel and sdist: the same bytes whenever a commit is built."""
    shutil.rmtree(DIST, ignore_errors=True)
    log = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    when = subprocess.run(log, capture_output=True, text=True, check=False).stdout.strip()
    environment = {**os.environ, **({"SOURCE_DATE_EPOCH": when} if when else {})}
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError("build failed: " + " / ".join((done.stdout + done.stderr).strip().splitlines()[-5:]))
    wheel, sdist = DIST / f"attn_bridge-{version}-py3-none-any.whl", DIST / f"attn_bridge-{version}.tar.gz"
    if when:
        archives.normalise(sdist, int(when))
    return wheel, sdist


def write_sbom(python: Path, version: str) -> list[str]:
    """Write what an environment holds, as CycloneDX, with the project at its root; return problems."""
    SBOM.mkdir(exist_ok=True)
    file = SBOM / "attn-bridge.cdx.json"
    with tempfile.TemporaryDirectory() as scratch:
        # The project's metadata as a file of its own: cyclonedx-py reads no version that is dynamic.
        project = Path(scratch) / "pyproject.toml"
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.setuptools.dynamic]")[0]
        project.write_text(text.replace('dynamic = ["version"]', f'version = "{version}"'), encoding="utf-8")
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--pyproject",
                   str(project), "--mc-type", "library", "--output-file", str(file), str(python)]  # fmt: skip
        problems = _output(command)
    if problems:
        return problems
    data = json.loads(file.read_text(encoding="utf-8"))
    names = {one["name"].lower() for one in data["components"]}
    print(f"  {file.relative_to(ROOT)}  {len(names)} packages")
    return [f"{file.name} lacks {name}" for name in ("numpy", "safetensors", "typer") if name not in names]


def installed(given: argparse.Namespace, wheel: Path) -> int:
    """Install the wheel on each Python with each extra, print a table, and return the exit status."""
    asked = given.install or ["3.11", "3.12", "3.13"]
    extras = list(environments.EXTRAS) if given.extra is None else given.extra
    unknown = [one for one in extras if one not in environments.EXTRAS]
    if unknown:
        raise ValueError(f"--extra ({unknown[0]}) must be one of {', '.join(filter(None, environments.EXTRAS))}")
    is_right = True
    with tempfile.TemporaryDirectory() as scratch:
        for python in asked:
            for extra in extras:
                found = environments.install(
                    wheel, python, extra, Path(scratch) / "environment",
                    environments.CONSTRAINTS if given.pinned else None,
                )  # fmt: skip
                shown = f"[{extra}]" if extra else "base"
                state = found.problem or f"import {found.imported:.3f} s, {found.said}"
                print(f"  Python {python}  {shown:<9} {found.seconds:6.0f} s  {state}", flush=True)
                is_right = is_right and not found.problem
    return 0 if is_right else 1


def _said(step: str, problems: Sequence[str]) -> bool:
    print(f"{step}: {'as it should be' if not problems else ''}", flush=True)
    for one in problems:
        print(f"  {one}")
    return not problems


def _output(command: Sequence[str]) -> list[str]:
    """Return nothing where a command succeeds, else what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().splitlines() if done.returncode else []


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
