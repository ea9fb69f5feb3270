"""Plants a fault in a scratch copy of a checkout and runs the tests that can reach it, until a test fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from .drawing import Fault, find_again
from .lanes import UNKNOWN_COST, Batch, Lane, batches, in_budget
from .planting import plant_exit

Outcome = Literal["caught", "timeout", "survived", "unreached", "undecided", "absent"]

DECIDED: tuple[Outcome, ...] = ("caught", "timeout", "absent")
"""Outcomes that further test files can't change."""

START, SLOWER = 60.0, 5.0
"""Processor seconds that a run may take: those of a start, and this many times the stored costs of its files."""

MEMORY = 16 * 2**30
"""Bytes that a process may hold: a fault may make a loop endless."""

PASSED = {0, 5}
"""Exit status of pytest: all passed, no test selected."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a trial.

    Attributes:
        outcome: ``caught`` by a test; ``timeout`` where tests end well within the limit without the fault; ``survived``
            tests of which one evaluates the expression; ``unreached`` where no test that ran evaluates it;
            ``undecided`` where tests need the time without the fault too; ``absent`` where the checkout lacks the line.
        test: the test that failed, or the lane whose tests ran too long; of a survivor, a test that evaluates it.
        seconds: processor seconds of all trials of the fault.
        files: test file that was to run -> digest of its text.
    """

    outcome: Outcome
    test: str = ""
    seconds: float = 0.0
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


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
        budget: processor seconds for the test files of a fault, by the costs that the checkout stores.
        limit: seconds after which a run is taken to wait forever.
    """

    def __init__(self, tree: Path, folder: Path, *, budget: float, limit: float):
        self.root, self.budget, self.limit = folder / "tree", budget, limit
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        _copy(tree, self.root)
        stored = self.root / "parity_tests" / "costs.json"
        self._costs: dict[str, float] = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
        self._ordered: dict[str, list[str]] = {}
        self._passing: dict[tuple[Lane, tuple[str, ...]], bool] = {}
        self._used = 0.0

    @classmethod
    @contextlib.contextmanager
    def of(cls, tree: Path, *, budget: float, limit: float) -> Iterator[Workshop]:
        """Copy a checkout into a temporary folder, and remove it in the end."""
        folder = Path(tempfile.mkdtemp(prefix="power-"))
        try:
            yield cls(tree, folder, budget=budget, limit=limit)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def order_tests(self, paths: Collection[str]) -> None:
        """Find the test files that can reach each of some files, nearest first; all of them where none can."""
        script = Path(__file__).with_name("ordering.py")
        command = [sys.executable, str(script), *paths]
        printed = subprocess.run(
            command, cwd=self.root, env=self._environment(), capture_output=True, check=True
        ).stdout
        every = sorted(test.relative_to(self.root).as_posix() for test in self.root.glob("parity_tests/**/test_*.py"))
        self._ordered |= {path: tests or every for path, tests in json.loads(printed).items()}

    def try_fault(self, fault: Fault, earlier: Result | None = None) -> Result:
        """Plant a fault, run the nearest tests in the budget until one fails, and take the fault out again.

        Args:
            fault: the fault; `order_tests` knows its file.
            earlier: an outcome for the same fault; test files that have not changed since are not run again.
        """
        path = self.root / fault.path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        site = find_again(fault, text)
        if site is None:
            return Result("absent")
        before = self._used
        earlier = earlier or Result("unreached")
        done = {test: digest for test, digest in earlier.files.items() if digest == self._digest(test)}
        tests = in_budget(self._ordered[fault.path], self.root, self._costs, self.budget, done)
        outcome, test = self._search(tests, path, text, site.plant(text))
        if outcome == "survived" and earlier.outcome in ("survived", "undecided"):
            outcome, test = earlier.outcome, earlier.test
        elif outcome == "survived":
            reached, test = self._search(tests, path, text, plant_exit(text, site))
            outcome = "unreached" if reached == "survived" else "survived"
        files = done | {test: self._digest(test) for test in tests}
        return Result(outcome, test, earlier.seconds + self._used - before, files)

    def _digest(self, test: str) -> str:
        path = self.root / test
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""

    def _search(self, tests: Sequence[str], path: Path, text: str, changed: str) -> tuple[Outcome, str]:
        """Run test files with a changed text; return the outcome, and the test that fails because of the change."""
        outcome: Outcome = "survived"
        for batch in batches(tests, self.root):
            with self._planted(path, text, changed):
                run = self._run(batch.lane, batch.tests, skipped=[])
            if run.status is None:
                if self._passes(batch.lane, batch.tests):
                    return "timeout", f"{batch.lane.name}: {' '.join(batch.tests)}"
                outcome = "undecided"
            elif run.status not in PASSED and (test := self._confirmed(batch, run, path, text, changed)):
                return "caught", test
        return outcome, ""

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
        """Return whether tests pass well within the limits without a fault."""
        key = (lane, tests)
        if key not in self._passing:
            run = self._run(lane, tests, skipped=[])
            self._passing[key] = run.status in PASSED and run.seconds < self._seconds(tests) / 2
        return self._passing[key]

    def _seconds(self, tests: Sequence[str]) -> float:
        """Return the processor seconds that a run of tests may take."""
        files = {test.partition("::")[0] for test in tests}
        return START + SLOWER * sum(self._costs.get(file, UNKNOWN_COST) for file in files)

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
        command = [*lane.command(tests), "-o", f"cache_dir={cache}"]
        for test in skipped:
            command += ["--deselect", test]
        begin = _children_seconds()
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=lane.environment(self._environment()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=functools.partial(_limit, int(self._seconds(tests))),
        )
        try:
            status: int | None = process.wait(self.limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = _children_seconds() - begin
        self._used += seconds
        last = cache / "v" / "cache" / "lastfailed"
        failed = list(json.loads(last.read_text(encoding="utf-8"))) if last.is_file() else []
        return _Run(None if status == -signal.SIGXCPU else status, failed, seconds)

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


def _limit(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system
