"""Choose the rows of parametrised tests that ``make test`` runs; the rest is marked ``full``, for ``make full``.

Of a product, each value of each argument runs once with each framework. Of a test that was measured,
``parity_tests/rows.json`` stores the rows to leave out, which run no code that other rows of the test don't run; a row
that is new since then always runs. To measure again, run tests of a lane in one process with probes in the project's
code, and choose from the records::

    python -m parity_tests.rows record build/rows/torch.json -q parity_tests --exact --without jax \
        -m "not optimized and not full"
    python -m parity_tests.rows choose build/rows/*.json

`choose` keeps, of each test, rows that together run every block of code that any of its rows runs, and of a product
every value of each short argument. Rows that start processes stay, as probes see one process, and so do rows that fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .probes import Blocks

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_name("rows.json")
"""Lane -> test -> the rows that it leaves out; a file instead of a test leaves out none, as all of it is cheap."""

FRAMEWORKS = {"side", "framework", "package", "backend"}
"""Arguments whose values are frameworks: rows of either run other code, and each has a cover of its own."""

VALUES = 8
"""Values of an axis up to which each is kept; more are a list of cases, of which the blocks decide."""

WORTH = 1.0
"""Processor seconds that leaving out rows of a test must save."""

RUNS = 2
"""Rows of a test that must run a block, if as many do."""

Lane = Mapping[str, Collection[str]]


def lane_of(without: Collection[str]) -> str:
    """Return the name of a lane by the frameworks that it goes without."""
    available = [name for name in ("torch", "jax") if name not in without]
    return "both" if len(available) == 2 else available[0] if available else "neutral"


# ---- the marks


def stored(lane: str) -> Lane:
    """Return test -> the rows that a lane leaves out."""
    lanes: dict[str, dict[str, list[str]]] = json.loads(STORED.read_text(encoding="utf-8"))
    return lanes.get(lane, {})


def mark(items: Iterable[pytest.Item], left_out: Lane) -> None:
    """Mark the rows that need not run as ``full``: those of `left_out`, and of other tests the rest of a product."""
    by_test: dict[str, list[tuple[str, pytest.Item]]] = defaultdict(list)
    for item in items:
        test, bracket, row = item.nodeid.partition("[")
        if bracket and not item.get_closest_marker("full"):
            by_test[test].append((row.removesuffix("]"), item))
    for test, rows in by_test.items():
        if test in left_out:
            names = set(left_out[test])
            rest = [item for row, item in rows if row in names]
            rest = rest if len(rest) < len(rows) else []  # the rows that made them needless are gone
        elif test.partition("::")[0] in left_out:
            rest = []
        else:
            items_of_test = [item for _, item in rows]
            kept = cover([values_of(item) for item in items_of_test])
            rest = [item for number, item in enumerate(items_of_test) if number not in kept]
        for item in rest:
            item.add_marker(pytest.mark.full)


def values_of(item: pytest.Item) -> dict[str, Hashable]:
    """Return axis -> identity of the value that a row has there.

    The arguments of a ``parametrize`` are one axis, as those of a list of cases, and the parameter of a fixture is one.
    """
    if not isinstance(item, pytest.Function):
        return {}
    values = {name: id(value) for name, value in item.callspec.params.items()}
    axes: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes[",".join(map(str.strip, names))] = tuple(values.pop(name.strip(), None) for name in names)
    return axes | values


def cover(rows: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """Return the numbers of rows in which each value of each axis occurs, for each framework.

    Args:
        rows: axis -> value, for each row.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[tuple(row[axis] for axis in row if axis in FRAMEWORKS)].append(number)
    return {numbers[index] for numbers in groups.values() for index in _cover([rows[number] for number in numbers])}


def _cover(rows: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """Return the numbers of rows in which each value of each axis occurs, all of them where there is one axis."""
    axes = _axes(rows)
    if len(axes) < 2:
        return set(range(len(rows)))
    values = [frozenset((name, row[name]) for name in axes) for row in rows]
    used: Counter[tuple[str, Hashable]] = Counter()
    kept: set[int] = set()
    while missing := frozenset[tuple[str, Hashable]]().union(*values) - used.keys():
        # Of rows with as many new values, the values that occur least: no value meets one of another axis alone.
        best = max(
            (number for number in range(len(rows)) if number not in kept),
            key=lambda number: (len(values[number] & missing), -sum(used[value] for value in values[number]), -number),
        )
        kept.add(best)
        used.update(values[best])
    return kept


def _axes(rows: Sequence[Mapping[str, Hashable]]) -> list[str]:
    """Return the axes that have several values."""
    return [axis for axis in (rows[0] if rows else ()) if len({row[axis] for row in rows}) > 1]


# ---- the record


@dataclasses.dataclass(frozen=True)
class Row:
    """What a row of a test did.

    Attributes:
        name: its id, without the brackets.
        seconds: processor time with that of its children.
        ran: numbers of the blocks that ran.
        values: axis -> the number of its value.
        is_whole: whether it passed and started no process, so that nothing is missing in `ran`.
    """

    name: str
    seconds: float
    ran: frozenset[int]
    values: Mapping[str, int]
    is_whole: bool


class Recorder:
    """A pytest plugin that records what each row runs."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self._processes, self._passed = 0, True
        self._numbers: dict[tuple[str, Hashable], int] = {}
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: object) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._processes += 1

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests without rows: nothing is to be chosen of them."""
        items[:] = [item for item in items if "[" in item.nodeid]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record a row."""
        before, self._processes, self._passed = _seconds(), 0, True
        self.blocks.take()
        result = yield
        test, _, row = item.nodeid.partition("[")
        values = {
            axis: self._numbers.setdefault((axis, value), len(self._numbers)) for axis, value in values_of(item).items()
        }
        is_whole = self._passed and not self._processes
        ran = frozenset(self.blocks.take())
        self.rows[test].append(Row(row.removesuffix("]"), _seconds() - before, ran, values, is_whole))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notice a row that did not pass."""
        self._passed &= report.passed

    def write(self, path: Path) -> None:
        """Write the rows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tests = {
            test: [[row.name, round(row.seconds, 4), sorted(row.ran), dict(row.values), row.is_whole] for row in rows]
            for test, rows in self.rows.items()
        }
        path.write_text(json.dumps({"blocks": self.blocks.names, "tests": tests}), encoding="utf-8")


def _seconds() -> float:
    return sum(os.times()[:4])


def read(path: Path) -> dict[str, list[Row]]:
    """Return test -> rows, as a `Recorder` wrote them."""
    tests = json.loads(path.read_text(encoding="utf-8"))["tests"]
    return {
        test: [Row(name, seconds, frozenset(ran), values, whole) for name, seconds, ran, values, whole in rows]
        for test, rows in tests.items()
    }


# ---- the choice


def left_out(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a test that others make needless, or nothing where that saves little."""
    axes = _short_axes(rows)
    wanted = {row.name: _reasons(row, axes) for row in rows if row.is_whole}
    counts = Counter(reason for reasons in wanted.values() for reason in reasons)
    missing = {reason: min(RUNS if isinstance(reason, int) else 1, count) for reason, count in counts.items()}
    kept = {row.name for row in rows if not row.is_whole}
    while missing:
        best = max(
            (row for row in rows if row.is_whole and row.name not in kept),
            key=lambda row: len(wanted[row.name] & missing.keys()) / (row.seconds + 0.01),
        )
        kept.add(best.name)
        for reason in wanted[best.name] & missing.keys():
            missing[reason] -= 1
            if not missing[reason]:
                del missing[reason]
    rest = [row for row in rows if row.name not in kept]
    return rest if sum(row.seconds for row in rest) >= WORTH else []


def _short_axes(rows: Sequence[Row]) -> list[str]:
    """Return the axes of a product that have few values."""
    axes = _axes([row.values for row in rows])
    return [axis for axis in axes if len(axes) > 1 and len({row.values[axis] for row in rows}) <= VALUES]


def _reasons(row: Row, axes: Iterable[str]) -> set[Hashable]:
    return {*row.ran, *((name, row.values[name]) for name in axes)}


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a lane, or choose from records and store the choice."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.rows", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run a lane with probes")
    record.add_argument("path", type=Path, metavar="LANE.json")
    record.add_argument("pytest", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of pytest")
    choose = commands.add_parser("choose", help=f"choose from records, and store the choice in {STORED.name}")
    choose.add_argument("paths", nargs="+", type=Path, metavar="LANE.json")
    options = parser.parse_args(arguments)
    return _record(options.path, options.pytest) if options.command == "record" else _choose(options.paths)


def _record(path: Path, words: Sequence[str]) -> int:
    from . import probes

    recorder = Recorder(probes.install(ROOT))
    # pytest would import the project itself, to rewrite assertions: the plugin makes it a package of pytest.
    status = pytest.main(["--assert=plain", *words], plugins=[recorder])
    recorder.write(path)
    return int(status)


def _choose(paths: Iterable[Path]) -> int:
    lanes: dict[str, dict[str, list[str]]] = json.loads(STORED.read_text(encoding="utf-8"))
    for path in paths:
        tests = read(path)
        chosen = {
            test: rest
            for test, rows in tests.items()
            if (rest := left_out(rows)) or len(cover([row.values for row in rows])) < len(rows)
        }
        rows = [row for test in tests.values() for row in test]
        gone = [row for rest in chosen.values() for row in rest]
        print(
            f"{path.stem}: {len(gone):,} of {len(rows):,} rows are left out, "
            f"{sum(row.seconds for row in gone):.0f} of {sum(row.seconds for row in rows):.0f} s"
        )
        kept = {test: names for test, names in lanes.get(path.stem, {}).items() if test not in tests}
        lanes[path.stem] = kept | {test: sorted(row.name for row in rest) for test, rest in chosen.items()}
    STORED.write_text(json.dumps(lanes, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
