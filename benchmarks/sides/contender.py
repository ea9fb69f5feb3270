"""The interface of the two frameworks to the measurement: contenders, which compute the same in different ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

KINDS = ("ours", "stock", "peer")
"""Ours; the framework's own; any other."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A contender with its inputs in place.

    Attributes:
        call: computes once and returns the result, possibly before it is ready.
        read: converts the result to float64 arrays, named as in `oracle.answer`.
        compile: compiles without running, if the framework can; then memory is not touched before the measurement.
    """

    call: Callable[[], object]
    read: Callable[[Any], dict[str, np.ndarray]]
    compile: Callable[[], object] | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute a group.

    Attributes:
        name: its name in the table.
        kind: one of `KINDS`.
        mode: ``"eager"`` or ``"compiled"``.
        make: allocates the inputs; raises NotImplementedError if the contender can't compute the group.
        picked: whether our function picks it by default.
        square: whether it keeps ``T x T`` arrays.
    """

    name: str
    kind: str
    mode: str
    make: Callable[[], Work]
    picked: bool = False
    square: bool = False

    @property
    def label(self) -> str:
        """The name that distinguishes it within its framework and group."""
        return f"{self.name}, {self.mode}"
