"""What the two frameworks hand to the measurement: contenders, which compute the same in their own way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

KINDS = ("ours", "stock", "peer")
"""Ours; what the framework itself has; any other."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A contender with its inputs in place.

    Attributes:
        call: computes once and returns what it computed, maybe before it is there.
        read: turns that into float64 arrays, named as `oracle.answer` names them.
        compile: compiles without running, where the framework can; then memory is not touched before it is measured.
    """

    call: Callable[[], Any]
    read: Callable[[Any], dict[str, np.ndarray]]
    compile: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute a group.

    Attributes:
        name: how it is called in the table.
        kind: one of `KINDS`.
        mode: ``"eager"`` or ``"compiled"``.
        make: puts the inputs in place; it raises NotImplementedError if the contender can't compute the group.
        picked: whether it is what our function picks by itself.
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
        """What tells it from the others of its framework and group."""
        return f"{self.name}, {self.mode}"
