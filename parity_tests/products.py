"""Mark the rows of products that ``make test`` leaves out as ``full``: ``make full`` runs them.

Of a product of stacked ``parametrize`` and parameters of fixtures, each value of each argument runs once with each
framework, as in a covering array of strength 1. A test file whose tests cost next to nothing runs whole.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest

from . import costs

FRAMEWORKS = {"side", "framework", "package", "backend"}
"""Arguments whose values are frameworks: rows of either run other code, and each has a cover of its own."""

CHEAP = 0.02
"""Processor seconds of a test on average up to which its file runs whole: collecting a row takes a few milliseconds."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the rows that need not run as ``full``."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        test, bracket, _ = item.nodeid.partition("[")
        files[test.partition("::")[0]].append(item)
        if bracket and not item.get_closest_marker("full"):
            tests[test].append(item)
    seconds = costs.stored()
    for test, rows in tests.items():
        file = test.partition("::")[0]
        if seconds.get(file, math.inf) > CHEAP * len(files[file]):
            kept = cover([values_of(item) for item in rows])
            for number, item in enumerate(rows):
                if number not in kept:
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
