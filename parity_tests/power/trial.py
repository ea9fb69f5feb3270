"""Plants a fault in a scratch copy of a checkout and runs the tests that can reach it, until a test fails."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from .drawing import Fault, find_again
from .lanes import Batch, Lane, batches

Outcome = Literal["caught", "timeout", "survived", "undecided", "absent"]

SIZES = (1, 3, 8, 24)
"""Test files in the first batches, and in each later one: the nearest decide soon, the others share a start."""

MEMORY = 16 * 2**30
"""Bytes that a process may hold: a fault may make a loop endless."""

PASSED = {0, 5}
"""Exit status of pytest: all passed, no test selected."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a trial.

    Attributes:
        outcome: ``caught`` by a test; ``timeout`` where tests end well within the limit without the fault; ``survived``
            all tests that can reach it; ``undecided`` where tests need the time without the fault too; ``absent``
            where the checkout lacks the line.
        test: the test that failed, or the lane whose tests ran too long.
        seconds: duration of the trial.
        files: number of test files that ran.
    """

    outcome: Outcome
    test: str
    seconds: float
    files: int


@dataclasses.dataclass(frozen=True)
class _Run:
    status: int | None
    failed: list[str]
    seconds: float


class Workshop:
    """A scratch copy of a checkout, in which faults are planted.

    Args:
        tree: root of the checkout; it stays as it is.
        folder: folder for the copy and for temporary files.
        limit: seconds that a batch of test files may take.
        workers: processes of pytest.
        nearest: number of test files to run, the nearest ones; all that can reach a fault by default.
    """

    def __init__(self, tree: Path, folder: Path, *, limit: float, workers: int, nearest: int | None):
        self.root, self.limit, self.workers, self.nearest = folder / "tree", limit, workers, nearest
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        _copy(tree, self.root)
        self._passing: dict[tuple[Lane, tuple[str, ...]], bool] = {}

    @classmethod
    @contextlib.contextmanager
    def of(cls, tree: Path, *, limit: float, workers: int, nearest: int | None = None) -> Iterator[Workshop]:
        """Copy a checkout into a temporary folder, and remove it in the end."""
        folder = Path(tempfile.mkdtemp(prefix="power-"))
        try:
            yield cls(tree, folder, limit=limit, workers=workers, nearest=nearest)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def ordered_tests(self, path: str) -> list[str]:
        """Return the test files of the copy that can reach a file, nearest first, and all where none can."""
        script = Path(__file__).with_name("ordering.py")
        command = [sys.executable, str(script), path]
        printed = subprocess.run(
            command, cwd=self.root, env=self._environment(), capture_output=True, check=True
        ).stdout
        every = sorted(test.relative_to(self.root).as_posix() for test in self.root.glob("parity_tests/**/test_*.py"))
        return json.loads(printed)[path] or every

    def try_fault(self, fault: Fault) -> Result:
        """Plant a fault, run tests until one fails, and take the fault out again."""
        begin = time.monotonic()
        path = self.root / fault.path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        site = find_again(fault, text)
        if site is None:
            return Result("absent", "", 0.0, 0)
        todo = batches(self.ordered_tests(fault.path), self.root, SIZES, self.nearest)
        outcome, test, files = "survived", "", 0
        for batch in todo:
            with self._planted(path, text, site.plant(text)):
                run = self._run(batch.lane, batch.tests, skipped=[])
            files += len(batch.tests)
            if run.status is None:
                if self._passes(batch.lane, batch.tests):
                    outcome, test = "timeout", f"{batch.lane.name}: {' '.join(batch.tests)}"
                    break
                outcome = "undecided"
            elif run.status not in PASSED:
                test = self._confirmed(batch, run, path, text, site.plant(text))
                if test:
                    outcome = "caught"
                    break
        return Result(outcome, test, time.monotonic() - begin, files)

    def _confirmed(self, batch: Batch, run: _Run, path: Path, text: str, changed: str) -> str:
        """Return the failed test, if it passes without the fault; otherwise that of a run without it, or nothing."""
        skipped: list[str] = []
        while run.status not in PASSED:
            failed = run.failed or list(batch.tests)
            broken = [test for test in failed if not self._passes(batch.lane, (test,))]
            if not broken:
                return failed[0] if run.failed else f"pytest itself, status {run.status}"
            if set(broken) <= set(skipped):  # pytest fails whatever is left out
                return ""
            skipped += broken
            with self._planted(path, text, changed):
                run = self._run(batch.lane, batch.tests, skipped=skipped)
            if run.status is None:
                return ""
        return ""

    def _passes(self, lane: Lane, tests: tuple[str, ...]) -> bool:
        """Return whether tests pass well within the limit without a fault."""
        key = (lane, tests)
        if key not in self._passing:
            run = self._run(lane, tests, skipped=[])
            self._passing[key] = run.status in PASSED and run.seconds < self.limit / 2
        return self._passing[key]

    @contextlib.contextmanager
    def _planted(self, path: Path, text: str, changed: str) -> Iterator[None]:
        _write(path, changed)
        try:
            yield
        finally:
            _write(path, text)

    def _run(self, lane: Lane, tests: Sequence[str], *, skipped: Sequence[str]) -> _Run:
        cache = self.temporary / "pytest"
        shutil.rmtree(cache, ignore_errors=True)
        workers = 0 if len(tests) == 1 else self.workers
        command = [*lane.command(tests, workers=workers), "-o", f"cache_dir={cache}"]
        for test in skipped:
            command += ["--deselect", test]
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=lane.environment(self._environment()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        try:
            status: int | None = process.wait(self.limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        last = cache / "v" / "cache" / "lastfailed"
        failed = list(json.loads(last.read_text(encoding="utf-8"))) if last.is_file() else []
        return _Run(status, failed, time.monotonic() - begin)

    def _environment(self) -> dict[str, str]:
        return dict(os.environ) | {"PYTHONPATH": str(self.root), "TMPDIR": str(self.temporary)}


def _copy(tree: Path, root: Path) -> None:
    """Copy a checkout as it is: its last commit, with its history, and what has changed since."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(tree), str(root)], check=True)
    for options in (["diff", "--name-only", "-z", "HEAD"], ["ls-files", "--others", "--exclude-standard", "-z"]):
        listed = subprocess.run(["git", *options], cwd=tree, capture_output=True, check=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (root / name).unlink(missing_ok=True)
            if (tree / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, root / name)


def _write(path: Path, text: str) -> None:
    """Write a source file and drop its bytecode, which Python takes for current if the second and the size agree."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
