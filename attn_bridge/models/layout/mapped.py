"""Results of a layout: outside tensors in terms of ours, and ours in terms of outside ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...weights.joint import strided
from ...weights.placements import Placement, Shape, joined
from ...weights.rows import Check

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class DecodedTensors:
    """Outside tensors in terms of ours.

    Attributes:
        placements: our name -> the placement of its elements.
        dropped: outside name that has no counterpart in ours -> the reason.
        restore: settings that lead back to the same outside names.
        checks: outside name -> function that checks a dropped tensor's numbers against the reason.
        copies: outside name that is dropped -> the outside name whose numbers it must repeat.
    """

    placements: dict[str, Placement]
    dropped: dict[str, str]
    restore: dict[str, Any]
    checks: dict[str, Check]
    copies: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Our tensors in terms of outside ones.

    Attributes:
        shapes: outside name -> shape.
        parts: outside name -> (our name -> the placement of its elements).
        ties: (our name, another name of ours that must have the same numbers and is left out).
    """

    shapes: dict[str, Shape]
    parts: dict[str, dict[str, Placement]]
    ties: list[tuple[str, str]]

    def read(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Return our tensors, extracted from outside ones of these names and shapes."""
        placements: dict[str, dict[int, Placement]] = {}
        for parts in self.parts.values():
            for name, placement in parts.items():
                placements.setdefault(name, {})[placement.start] = placement
        return {name: gathered(arrays, joined(pieces)) for name, pieces in placements.items()}

    def write(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outside tensors, made of ours."""
        tensors = {}
        for theirs, parts in self.parts.items():
            result = np.empty(self.shapes[theirs], next(arrays[name].dtype for name in parts))
            for name, placement in parts.items():
                atoms = [size for axis in placement.axes for size, _ in axis]
                numbers = arrays[name] if placement.change is None else placement.change.there(arrays[name])
                if placement.axes:
                    numbers = numbers[placement.start : placement.start + placement.rows]
                strided(result, placement)[...] = numbers.reshape(atoms)
            tensors[theirs] = result
        return tensors


def gathered(arrays: Mapping[str, np.ndarray], placement: Placement) -> np.ndarray:
    """Return a copy of one of our tensors, from the outside ones that it is placed in."""
    views = [view(arrays[piece.theirs], piece) for piece in placement.pieces]
    return np.concatenate(views) if len(views) > 1 else views[0].copy()


def view(array: np.ndarray, placement: Placement) -> np.ndarray:
    """Return one of our tensors, from the outside one that it is placed in."""
    elements = strided(np.ascontiguousarray(array), placement).reshape(placement.shape)
    return elements if placement.change is None else placement.change.back(elements)
