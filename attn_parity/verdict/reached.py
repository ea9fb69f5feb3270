"""Which rows and columns of matrices a gradient reached, over all samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..sides.large import release
from ..sides.subject import Array

MAX_RANGES = 4
"""How many ranges of rows are named."""


class Reached:
    """Keeps which rows and columns of matrices have had a gradient."""

    def __init__(self) -> None:
        self._found: dict[str, list[Array]] = {}

    def note(self, name: str, gradient: Array) -> None:
        """Keep which rows and columns of a matrix have had a gradient."""
        moved = gradient != 0
        found = [moved.any(axis=tuple(other for other in range(moved.ndim) if other != axis)) for axis in (0, 1)]
        release(gradient)
        self._join(name, found)

    def join(self, other: Reached) -> None:
        """Take over what had a gradient in other samples."""
        for name, found in other._found.items():
            self._join(name, found)

    def _join(self, name: str, found: list[Array]) -> None:
        before = self._found.get(name, found)
        self._found[name] = [one | two for one, two in zip(before, found, strict=True)]

    def unreached(self) -> Iterator[str]:
        """Say which rows and columns of matrices no gradient reached, of those that any did reach."""
        for name, axes in self._found.items():
            for what, reached in zip(("rows", "columns"), axes, strict=True):
                if reached.any() and not reached.all():
                    left = np.flatnonzero(~reached)
                    yield (
                        f"{left.size} of {reached.size} {what} of {name.removeprefix('grad ')}: no gradient reached "
                        f"{ranges(left)}"
                    )


def ranges(numbers: Array) -> str:
    """Write whole numbers in order: ``0, 9-11``; the first few where there are many."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    shown = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:MAX_RANGES]]
    return ", ".join([*shown, *["..."] * (len(runs) > MAX_RANGES)])
