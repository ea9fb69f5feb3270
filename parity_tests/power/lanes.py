"""The lanes of ``make test``: which test files run with which frameworks, and the command that runs them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ..conftest import EVERYWHERE, NEEDS

UNKNOWN_COST = 10.0
"""Processor seconds assumed for a test file without a stored cost: about the mean of the suite."""

LATER = ("tours", "faults", "meshes", "site", "wild", "twins/mutation", "twins/places")
"""Folders that other targets than ``make test`` run."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """A way to run test files.

    Attributes:
        name: word for it in the table.
        without: frameworks that can't be imported in it.
        optimized: whether XLA optimizes, and only the tests run that need it.
    """

    name: str
    without: tuple[str, ...] = ()
    optimized: bool = False

    def takes(self, path: str, text: str) -> bool:
        """Return whether the lane runs tests of a file, a path relative to the repository's root, with this text."""
        folder = path.removeprefix("parity_tests/")
        if not path.startswith("parity_tests/") or folder.startswith(tuple(f"{later}/" for later in LATER)):
            return False
        if self.optimized:
            return "mark.optimized" in text
        if Path(path).name in EVERYWHERE:
            return True
        available = {"torch", "jax"} - set(self.without)
        return any(needed == available for needed in NEEDS.get(folder.partition("/")[0], []))

    def command(self, tests: Sequence[str]) -> list[str]:
        """Return pytest's command, which runs tests in one process and stops at the first failure."""
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-rN", "--tb=short", "-n0"]
        for framework in self.without:
            words += ["--without", framework]
        marks = "optimized" if self.optimized else "not optimized"
        return [*words, "-m", f"{marks} and not full", *tests]

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        """Return the environment of the command."""
        return base | ({"XLA_FLAGS": ""} if self.optimized else {})


LANES = (
    Lane("neutral", ("torch", "jax")),
    Lane("torch", ("jax",)),
    Lane("jax", ("torch",)),
    Lane("both"),
    Lane("optimized", optimized=True),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Test files that one command runs, nearest first."""

    lane: Lane
    tests: tuple[str, ...]


def batches(tests: Iterable[str], root: Path) -> list[Batch]:
    """Divide ordered test files, paths relative to the root of a checkout, into a batch per lane that runs any of them.

    The lane with the nearest file comes first.
    """
    texts = {path: (root / path).read_text(encoding="utf-8") for path in tests}
    by_lane = [Batch(lane, tuple(path for path in texts if lane.takes(path, texts[path]))) for lane in LANES]
    order = list(texts)
    return sorted((batch for batch in by_lane if batch.tests), key=lambda batch: order.index(batch.tests[0]))


def in_budget(
    ordered: Iterable[str], root: Path, stored: Mapping[str, float], seconds: float, done: Collection[str]
) -> list[str]:
    """Return the nearest test files whose stored costs, together, fit a budget.

    Args:
        ordered: paths relative to the root, nearest first; those that no lane runs are left out.
        root: root of the checkout.
        stored: test file -> processor seconds; others are assumed to need `UNKNOWN_COST`.
        seconds: the budget.
        done: files that have run: they use up their part of the budget and are left out.
    """
    result = []
    for path in ordered:
        cost = stored.get(path, UNKNOWN_COST)
        if cost > seconds:
            continue
        text = (root / path).read_text(encoding="utf-8")
        if any(lane.takes(path, text) for lane in LANES):
            seconds -= cost
            if path not in done:
                result.append(path)
    return result
