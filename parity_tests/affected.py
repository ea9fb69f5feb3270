"""Run the tests that a change can break, nearest first: ``make affected``.

The import graph (grimp, which import-linter brings) gives the test files that a changed file can reach, and the number
of imports between them. Modules that the code loads by name are edges as well: a text that names a module counts as an
import of it. The nearest files run, as many as fit ``--seconds`` by the costs that ``parity_tests/costs.json`` stores;
the output counts the files left for ``make test``.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import grimp

from . import costs

ROOT = Path(__file__).parent.parent
PACKAGES = ("attn_bridge", "attn_kernels", "torch_attn", "jax_attn", "parity_tests", "benchmarks")
LOADED_BELOW = ("torch_attn", "jax_attn")
"""Packages below which `attn_bridge.backends` loads modules by name."""

EVERYTHING = ("conftest.py", "pyproject.toml", "constraints.txt", "Makefile")
"""Names of files that every test depends on."""

SLOW = tuple(f"parity_tests/{folder}/" for folder in ("faults", "wild", "twins/mutation", "site", "meshes"))
"""Folders whose tests `make full` runs: minutes each."""

UNKNOWN_COST = 10.0
"""Processor seconds assumed for a test file without a stored cost: about the mean of the suite."""

CORES = 2
"""Processes that the tests run in; fixed, so that a change selects the same tests on every machine."""

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


def importers() -> dict[str, set[str]]:
    """Return module -> modules that import it, by statement or by a text that names it."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    direct = {module: set(graph.find_modules_that_directly_import(module)) for module in graph.modules}
    for module in graph.modules:
        path = path_of(module)
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        for text in named_in((ROOT / path).read_text(encoding="utf-8")):
            for parent in ("", package, *LOADED_BELOW):
                target = f"{parent}.{text}".lstrip(".")
                if target in direct and target != module:
                    direct[target].add(module)
    return direct


def named_in(source: str) -> set[str]:
    """Return the string constants of a module that can be names of modules."""
    texts = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in texts if all(part.isidentifier() for part in text.split("."))}


def path_of(module: str) -> str:
    """Return the file of a module, relative to the repository."""
    stem = module.replace(".", "/")
    return f"{stem}/__init__.py" if (ROOT / stem).is_dir() else f"{stem}.py"


def distances(changed: Iterable[str], direct: Mapping[str, set[str]]) -> dict[str, int]:
    """Return test file -> number of imports between it and the nearest changed file.

    A test file whose name shares a word with a changed module counts as one import nearer: the facade of a package
    hides which of its modules a test is about. A changed file that is not a module stands for those of its folder.
    """
    modules = {path_of(module): module for module in direct}
    starts = set()
    for path in changed:
        if path in modules:
            starts.add(modules[path])
        else:
            folder = path.rpartition("/")[0]
            starts |= {module for file, module in modules.items() if folder and file.rpartition("/")[0] == folder}
    words = {word for module in starts for part in module.split(".")[1:] for word in part.split("_")}
    steps = dict.fromkeys(starts, 0)
    queue = collections.deque(starts)
    while queue:
        module = queue.popleft()
        for importer in direct[module] - steps.keys():
            steps[importer] = steps[module] + 1
            queue.append(importer)
    tests = {module: count for module, count in steps.items() if module.rpartition(".")[2].startswith("test_")}
    return {
        path_of(module): count - (count > 0 and not words.isdisjoint(module.rpartition(".")[2].split("_")))
        for module, count in tests.items()
    }


def select(reach: Mapping[str, int], seconds: float, stored: Mapping[str, float]) -> Selection:
    """Divide test files into those to run within a time and the rest.

    Args:
        reach: test file -> distance.
        seconds: what the run may take on `CORES` cores, its start included.
        stored: test file -> processor seconds.
    """
    fast = [file for file in reach if not file.startswith(SLOW)]
    ordered = sorted(fast, key=lambda file: (reach[file], stored.get(file, UNKNOWN_COST), file))
    left = (seconds - START) * CORES
    nearest = []
    for file in ordered:
        cost = stored.get(file, UNKNOWN_COST)
        if reach[file] == 0 or cost <= left:  # a changed test file runs, however long it takes
            nearest.append(file)
            left -= cost
    return Selection(tuple(nearest), tuple(file for file in reach if file not in nearest))


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
    stored = json.loads(costs.STORED.read_text(encoding="utf-8"))
    reach = distances(changed, importers())
    selection = select(reach, options.seconds, stored)
    if options.list:
        print(*selection.nearest, sep="\n")
        return 0
    print(f"{len(selection.nearest)} of {len(reach)} test files that this change can break, nearest first", flush=True)
    if not selection.nearest:
        print("no test imports what changed; make tours runs documented pages")
        return 0
    words = [sys.executable, "-m", "pytest", "-q", "-n", str(CORES), "--dist", "worksteal", "-m", "not optimized"]
    status = subprocess.run([*words, *selection.nearest], cwd=ROOT, env=os.environ, check=False).returncode
    if selection.rest:
        print(f"not run: {len(selection.rest)} files further away; make test runs them, make full all of them")
    return status


if __name__ == "__main__":
    sys.exit(main())
