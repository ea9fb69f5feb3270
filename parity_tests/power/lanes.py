"""The lanes of ``make test``: which test files run with which frameworks, and the command that runs them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..conftest import EVERYWHERE, NEEDS

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

    def command(self, tests: Sequence[str], *, workers: int) -> list[str]:
        """Return pytest's command, which stops at the first failure."""
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-rN", "--tb=short", "-n", str(workers)]
        words += ["--dist", "worksteal"] if workers else []
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


def batches(ordered: Iterable[str], root: Path, sizes: Sequence[int], nearest: int | None = None) -> list[Batch]:
    """Divide ordered test files into batches.

    Args:
        ordered: paths relative to the root; those that no lane runs are left out.
        root: root of the checkout.
        sizes: number of files in the first batch, in the second, and so on; the last number repeats.
        nearest: number of files to take, all by default.
    """
    texts = {path: (root / path).read_text(encoding="utf-8") for path in ordered}
    remaining = [path for path in texts if any(lane.takes(path, texts[path]) for lane in LANES)][:nearest]
    result = []
    for number in range(len(remaining)):
        size = sizes[min(number, len(sizes) - 1)]
        group, remaining = remaining[:size], remaining[size:]
        for lane in LANES:
            tests = tuple(path for path in group if lane.takes(path, texts[path]))
            if tests:
                result.append(Batch(lane, tests))
    return result
