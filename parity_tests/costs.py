"""Measure what each test costs: ``pytest --costs FILE`` writes processor seconds, compilation and process starts.

A pytest plugin, registered by ``parity_tests/conftest.py``. Processor time is that of the test's process and of the
children that it waited for, so that a busy machine changes it little. ``python -m parity_tests.costs FILE...`` prints a
table of such files, and ``--write`` stores the seconds of each test file for ``make affected``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "costs.json"
"""Test file -> processor seconds, rounded; written by this module."""

STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
"""Audit events of Python that stand for a new process."""

COMPILE, TRACE = ("backend_compile_duration",), ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration")
"""Endings of JAX's monitoring events: compilation by XLA, and tracing and lowering before it."""


def stored() -> dict[str, float]:
    """Return test file -> processor seconds, as stored."""
    seconds: dict[str, float] = json.loads(STORED.read_text(encoding="utf-8")) if STORED.is_file() else {}
    return seconds


@dataclasses.dataclass
class Cost:
    """What tests used: processor seconds, seconds of compilation and tracing, started processes."""

    tests: int = 0
    cpu: float = 0.0
    children: float = 0.0
    compiling: float = 0.0
    tracing: float = 0.0
    processes: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Return the sum of two costs."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(mine + theirs for mine, theirs in pairs))

    def __sub__(self, other: Cost) -> Cost:
        """Return the cost between two readings."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(mine - theirs for mine, theirs in pairs))


class Meter:
    """Reads the costs of this process; the plugin of a process that runs tests."""

    def __init__(self) -> None:
        self._events = Cost()
        self._listens = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: object) -> None:
        if event in STARTS:
            self._events.processes += 1

    def _duration(self, event: str, seconds: float, **_: object) -> None:
        if event.endswith(COMPILE):
            self._events.compiling += seconds
        elif event.endswith(TRACE):
            self._events.tracing += seconds

    def read(self) -> Cost:
        """Return the costs of this process so far."""
        times = os.times()
        own, children = times.user + times.system, times.children_user + times.children_system
        return dataclasses.replace(self._events, cpu=own + children, children=children)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure a test with its fixtures; the report of its teardown carries the figures."""
        if not self._listens and "jax" in sys.modules:
            sys.modules["jax"].monitoring.register_event_duration_secs_listener(self._duration)
            self._listens = True
        self._before = self.read()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, object, object]:
        """Add the figures to the last report of a test."""
        report = yield
        if call.when == "teardown":
            cost = dataclasses.replace(self.read() - self._before, tests=1)
            report.user_properties = [*report.user_properties, ("cost", dataclasses.astuple(cost))]
        return report


class Writer:
    """Collects the figures of all workers of a run and writes them at its end."""

    def __init__(self, path: Path):
        self.path = path
        self.tests: dict[str, Cost] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the figures of a test."""
        for name, values in report.user_properties:
            if name == "cost":
                self.tests[report.nodeid] = Cost(*values)

    def pytest_sessionfinish(self) -> None:
        """Write one row per test."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: dataclasses.astuple(cost) for name, cost in self.tests.items()}
        self.path.write_text(json.dumps(rows, indent=0), encoding="utf-8")


def register(config: pytest.Config, path: str) -> None:
    """Add the plugins for one run: the meter where tests run, the writer where reports arrive."""
    is_worker, has_workers = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    if is_worker or not has_workers:
        config.pluginmanager.register(Meter(), "costs_meter")
    if not is_worker:
        config.pluginmanager.register(Writer(Path(path)), "costs_writer")


# ---- the command


def read(paths: Iterable[Path]) -> dict[str, dict[str, Cost]]:
    """Return lane -> test -> cost; a file's name without its ending is its lane."""
    return {
        path.stem: {name: Cost(*row) for name, row in json.loads(path.read_text(encoding="utf-8")).items()}
        for path in paths
    }


def by_file(tests: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return test file -> cost of its tests."""
    files: dict[str, Cost] = collections.defaultdict(Cost)
    for name, cost in tests.items():
        files[name.partition("::")[0]] += cost
    return dict(files)


def table(lanes: Mapping[str, Mapping[str, Cost]]) -> str:
    """Return a Markdown table, one row per lane."""
    lines = ["| lane | tests | CPU minutes | compiling (XLA) | tracing (JAX) | child processes | starts |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for lane, tests in lanes.items():
        cost = sum(tests.values(), Cost())
        shares = " | ".join(f"{part / cost.cpu:.0%}" for part in (cost.compiling, cost.tracing, cost.children))
        lines.append(f"| {lane} | {cost.tests:,} | {cost.cpu / 60:.1f} | {shares} | {cost.processes} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and the dearest files with ``--files``; with ``--write`` store the seconds of these files.

    What is stored of other files stays, unless they are gone. A file that runs in several lanes has the sum of those
    that are given.
    """
    parser = argparse.ArgumentParser(prog="python -m parity_tests.costs", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="what pytest --costs wrote, LANE.json")
    parser.add_argument("--files", type=int, default=0, metavar="N", help="also print the N dearest files of each lane")
    parser.add_argument("--write", action="store_true", help=f"store each file's seconds in {STORED.name}")
    options = parser.parse_args(arguments)
    lanes = read(options.paths)
    print(table(lanes))
    for lane, tests in lanes.items():
        dearest = sorted(by_file(tests).items(), key=lambda item: -item[1].cpu)[: options.files]
        for file, cost in dearest:
            print(f"{lane:10} {cost.cpu:7.1f} s {cost.tests:5} tests {cost.compiling:7.1f} s compiling  {file}")
    if options.write:
        total: dict[str, float] = collections.defaultdict(float)
        for tests in lanes.values():
            for file, cost in by_file(tests).items():
                total[file] += cost.cpu
        measured = {file: round(seconds, 1) for file, seconds in total.items()}
        kept = {file: seconds for file, seconds in stored().items() if (STORED.parents[1] / file).is_file()}
        STORED.write_text(json.dumps(dict(sorted((kept | measured).items())), indent=0) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
