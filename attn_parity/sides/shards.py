"""Device placement of an array's shards, as plain data, and the shards in which two arrays differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from attn_bridge.printable import listed

from .arrays import unit_of

Array = np.ndarray

COPIES_APART = 64.0
"""Units in the last place of the largest value by which copies may differ: devices may add up in another order."""

MAX_NAMED = 3
"""Most shards that are named."""


@dataclasses.dataclass(frozen=True)
class ShardCut:
    """How devices share an array.

    Attributes:
        axes: for each axis of the array the axes of the mesh that cut it, the first of them coarsest, with their sizes.
    """

    axes: tuple[tuple[tuple[str, int], ...], ...]

    @property
    def is_cut(self) -> bool:
        """Whether there is more than one part."""
        return any(size > 1 for axis in self.axes for _, size in axis)

    def numbers(self, shape: Sequence[int]) -> Array:
        """Return, for each element of an array, the number of the shard that it is in, as a float."""
        numbers = np.zeros(tuple(shape))
        for position, (size, cuts) in enumerate(zip(shape, self.axes, strict=True)):
            parts = math.prod(count for _, count in cuts)
            per_part = max(-(-size // parts), 1)
            along = np.arange(size) // per_part
            numbers = numbers * parts + along.reshape(-1, *[1] * (len(shape) - position - 1))
        return numbers

    def name(self, number: int) -> str:
        """Return the name of the shard with this number, such as ``tensor=1``."""
        sizes = [(name, size) for axis in self.axes for name, size in axis]
        words = []
        for name, size in reversed(sizes):
            number, at = divmod(number, size)
            words.append(f"{name}={at}")
        return ", ".join(reversed(words))

    @property
    def count(self) -> int:
        """How many shards there are."""
        return math.prod(size for axis in self.axes for _, size in axis)


@dataclasses.dataclass(frozen=True)
class Shares:
    """How devices share the results of a run, and where those that should hold the same numbers do not.

    Attributes:
        outputs: how each output is cut.
        parameters: how a gradient is, by the name of its parameter; of those that are cut.
        apart: one line for each result whose copies differ.
    """

    outputs: tuple[ShardCut, ...] = ()
    parameters: dict[str, ShardCut] = dataclasses.field(default_factory=dict)
    apart: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """How many devices each axis of the mesh has, of those that cut a result."""
        cuts = (*self.outputs, *self.parameters.values())
        return {name: size for cut in cuts for axis in cut.axes for name, size in axis}

    @property
    def any_cut(self) -> bool:
        """Whether any result has more than one part."""
        return any(one.is_cut for one in (*self.outputs, *self.parameters.values()))


def where(differs: Array, numbers: Array, cut: ShardCut) -> str:
    """Return the shards in which elements differ, as text; "" if all of them, or none.

    Args:
        differs: bool, True for elements that differ.
        numbers: of `ShardCut.numbers`, perhaps moved as the elements were.
        cut: names the shards.
    """
    shards = np.unique(numbers[differs]).astype(int).tolist()
    if not shards or len(shards) == cut.count:
        return ""
    return f"only in {named(shards, cut)}"


def named(shards: Sequence[int], cut: ShardCut) -> str:
    """Return the names of some shards, by their numbers."""
    names = listed([cut.name(number) for number in shards], MAX_NAMED, "; ")
    return f"shard{'s' * (len(shards) > 1)} {names} of {cut.count}"


def differing_copies(copies: Iterable[tuple[str, Array]]) -> str:
    """Describe the first copy of an array that differs from the first device's by more than rounding; "" if all agree.

    Args:
        copies: name of a device, and the array that it holds.
    """
    (first_name, first), *others = copies
    limit = COPIES_APART * unit_of(first.dtype.name) if first.dtype.kind not in "biu" else 0.0
    scale = float(np.abs(first).max(initial=0.0)) or 1.0
    for name, other in others:
        apart = float(np.abs(other.astype(np.float64) - first.astype(np.float64)).max(initial=0.0))
        if not apart <= limit * scale:
            return f"{name} holds other numbers than {first_name}, by {apart / scale:.2g} of the largest value"
    return ""
