"""Run the tests that a change can break, nearest first: ``make affected``.

The import graph (`power.ordering`) gives the test files that a changed file can reach, and their distances in imports.
The nearest files run, as many as fit ``--seconds`` by the costs that ``parity_tests/costs.json`` stores; the output
counts the files left for ``make test``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from . import costs
from .power import lanes, ordering

ROOT = Path(__file__).parent.parent
EVERYTHING = ("conftest.py", "pyproject.toml", "constraints.txt", "Makefile")
"""Names of files that every test depends on."""

SLOW = tuple(f"parity_tests/{folder}/" for folder in ("faults", "wild", "twins/mutation", "site", "meshes"))
"""Folders whose tests `make full` runs: minutes each."""

CORES = 2
"""Processes that the tests run in; fixed, so that a change selects the same tests on every machine."""

SHOWN = 3
"""Failures after which a run stops: they are what the developer waits for."""

START = 12.0
"""Seconds of a run before its first test: starting pytest and importing both frameworks."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The test files that a change can break.

    Attributes:
        nearest: the files to run.
        rest: files that the change can reach as well, left for `make test`.
    """

    nearest: tuple[str, ...]
    rest: tuple[str, ...]


def changed_files(base: str) -> list[str]:
    """Return the files that differ from a revision, untracked ones included, relative to the repository."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout for words in commands]
    return sorted({line for output in outputs for line in output.splitlines()})


def nearest_first(changed: Collection[str], edges: ordering.Edges) -> list[str]:
    """Return the test files that changed files can break: changed ones, then the nearest to any of them.

    A changed file that is not a module stands for the modules of its folder.
    """
    modules = {ordering.module_of(path) for path in changed} & edges.keys()
    for path in changed:
        folder = path.rpartition("/")[0]
        if folder and ordering.module_of(path) not in edges:
            package = ordering.module_of(f"{folder}/__init__.py")
            modules |= {module for module in edges if module == package or module.rpartition(".")[0] == package}
    ranks: dict[str, int] = {}
    for module in modules:
        for rank, file in enumerate(ordering.by_distance(f"{module.replace('.', '/')}.py", edges, ROOT)):
            ranks[file] = min(rank, ranks.get(file, rank))
    return sorted(ranks, key=lambda file: (file not in changed, ranks[file], file))


def select(ordered: Sequence[str], changed: Collection[str], seconds: float, stored: Mapping[str, float]) -> Selection:
    """Divide test files into those to run within a time and the rest.

    Args:
        ordered: test files, nearest first.
        changed: changed files; a changed test file runs, however long it takes.
        seconds: what the run may take on `CORES` cores, its start included.
        stored: test file -> processor seconds.
    """
    left = (seconds - START) * CORES
    nearest = []
    for file in ordered:
        cost = stored.get(file, lanes.UNKNOWN_COST)
        if file in changed or (cost <= left and not file.startswith(SLOW)):
            nearest.append(file)
            left -= cost
    return Selection(tuple(nearest), tuple(file for file in ordered if file not in nearest))


def main(arguments: Sequence[str] | None = None) -> int:
    """Select the tests and run them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.affected", description=__doc__)
    parser.add_argument("files", nargs="*", help="changed files; default: those that differ from --base")
    parser.add_argument("--base", default="HEAD", metavar="REV", help="revision to compare with (default: HEAD)")
    parser.add_argument("--seconds", type=float, default=60, help="time for the tests on two cores (default: 60)")
    parser.add_argument("--list", action="store_true", help="print the test files, nearest first, and run nothing")
    options = parser.parse_args(arguments)
    changed = options.files or changed_files(options.base)
    if not changed:
        print(f"no file differs from {options.base}")
        return 0
    if everything := [path for path in changed if path.rpartition("/")[2] in EVERYTHING]:
        print(f"every test depends on {everything[0]}: make test")
        return 2
    stored = costs.stored()
    ordered = nearest_first(changed, ordering.importers(ROOT))
    selection = select(ordered, changed, options.seconds, stored)
    if options.list:
        print(*selection.nearest, sep="\n")
        return 0
    print(
        f"{len(selection.nearest)} of {len(ordered)} test files that this change can break, nearest first", flush=True
    )
    if not selection.nearest:
        print("no test imports what changed; make tours runs documented pages")
        return 0
    words = [sys.executable, "-m", "pytest", "-q", "-n", str(CORES), "--dist", "worksteal", "--maxfail", str(SHOWN)]
    words += ["-m", "not optimized and not full"]
    status = subprocess.run([*words, *selection.nearest], cwd=ROOT, env=os.environ, check=False).returncode
    if selection.rest:
        print(f"not run: {len(selection.rest)} files further away; make test runs them, make full all of them")
    return status


if __name__ == "__main__":
    sys.exit(main())
