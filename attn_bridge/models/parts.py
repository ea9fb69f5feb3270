"""Parts of published checkpoints outside the model that a layout describes; they are left out by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..weights.templates import fill, match

TOWER = "it is no part of the text model, which alone is converted"
"""Reason to leave out encoders of images or sound."""


@dataclasses.dataclass(frozen=True)
class OmittedPart:
    """Tensors that a layout leaves out.

    Attributes:
        begin: prefix of their names; may contain ``{prefix}`` and ``{i}``.
        reason: why they are left out.
        mark: suffix after `begin` that a name of such a part alone has; "": every name with the prefix is of the part.
    """

    begin: str
    reason: str = TOWER
    mark: str = ""

    @property
    def is_tower(self) -> bool:
        """Return whether the part is an encoder of a multimodal model, so that the text model remains."""
        return self.reason == TOWER

    def beginnings(self, names: Sequence[str], prefixes: tuple[str, ...]) -> set[str]:
        """Return the prefixes of the part's names, in a checkpoint of these names."""
        if not self.mark:
            return {self.begin}
        matches = (match(self.begin + self.mark, name, prefixes) for name in names if name.endswith(self.mark))
        return {fill(self.begin, values) for values in matches if values is not None}


def towers(*names: str, fronts: tuple[str, ...] = ("", "model.")) -> tuple[OmittedPart, ...]:
    """Return the parts of multimodal models below these names, behind any of the fronts."""
    return tuple(OmittedPart(front + name) for front in fronts for name in names)


def apart(parts: Iterable[OmittedPart], names: Sequence[str], prefixes: tuple[str, ...]) -> dict[str, OmittedPart]:
    """Return name -> the part that it belongs to."""
    begins = {begin: part for part in parts for begin in part.beginnings(names, prefixes)}
    every = tuple(begins)
    return {
        name: next(part for begin, part in begins.items() if name.startswith(begin))
        for name in names
        if name.startswith(every)
    }
