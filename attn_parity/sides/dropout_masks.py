"""Shared dropout masks for both sides, and the comparison of the masks that each side requests.

``drawing.py`` in both rooms of `frameworks` makes dropout take its masks from here; `compare` in train mode and `train`
judge the recorded draws.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import zlib
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from attn_bridge import rng

from ..results.findings import Verdict

Found = TypeVar("Found")
Shape = tuple[int, ...]

_AXES = ("batch", "heads", "queries", "keys")
"""Names of the axes of an attention-weight mask."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """One mask that a module requested.

    Attributes:
        shape: its shape.
        keep: probability with which an element is kept.
        path: the submodule whose code requested it.
        setting: the submodule's setting that makes the mask smaller than the dropped array, if any.
    """

    shape: Shape
    keep: float
    path: str = ""
    setting: str = ""

    @property
    def rate(self) -> float:
        """Probability with which an element is dropped; JAX compares in float32."""
        return 1.0 - float(np.float32(self.keep))

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    def __str__(self) -> str:
        return f"{self.shape} at rate {self.rate:.4g}"


class Masks:
    """The masks of one call, or of one training step, for either side: those of one shape in the order of the calls.

    JAX's threefry draws them: the key of the seed, folded with the step, the shape, and how many masks of the shape
    were drawn before. Axes of size 1 and the order of the axes make no other shape: sides that have batch and time
    the other way round get the same mask, turned. Axes of one size keep their order.

    Args:
        seed: of the whole comparison or training.
        step: number of the sample or step.
    """

    def __init__(self, seed: int, step: int = 0):
        self._of = seed, step
        self.restart()

    @functools.cached_property
    def _key(self) -> Any:
        seed, step = self._of
        return rng.fold_in(rng.key(seed), step)

    def restart(self) -> None:
        """Reset the stream before a call is repeated."""
        self._drawn: dict[Shape, int] = collections.defaultdict(int)
        self.draws: list[Draw] = []

    def draw(self, shape: Shape, keep: float, path: str = "", setting: str = "") -> np.ndarray:
        """Return a bool mask that is True with probability `keep`."""
        self.draws.append(Draw(shape, keep, path, setting))
        axes = _order(shape)
        sizes = tuple(shape[axis] for axis in axes)
        key = rng.fold_in(rng.fold_in(self._key, zlib.crc32(repr(sizes).encode())), self._drawn[sizes])
        self._drawn[sizes] += 1
        mask = rng.bernoulli(key, float(keep), sizes)
        return np.ascontiguousarray(mask.transpose(np.argsort(axes))).reshape(shape)


class MaskPlan:
    """Mask source for tracing: records the requested draws and returns traced operands as masks, in order."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self._operands: Sequence[object] | None = None

    def start(self, operands: Sequence[object] | None) -> None:
        """Reset the plan; with None it returns masks that keep everything."""
        self.draws, self._operands = [], operands

    def draw(self, shape: Shape, keep: float, path: str = "", setting: str = "") -> Any:
        """Return the next operand."""
        self.draws.append(Draw(shape, keep, path, setting))
        return np.ones(shape, np.bool_) if self._operands is None else self._operands[len(self.draws) - 1]


def asking(owners: Mapping[int, Found]) -> Found | None:
    """Return the entry of the innermost object, by its id, whose method is being run; None outside of all."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        entry = owners.get(id(frame.f_locals.get("self")))
        if entry is not None:
            return entry
        frame = frame.f_back
    return None


@dataclasses.dataclass(frozen=True)
class Difference:
    """A mask that the two sides do not share; `first` or `second` is None where that side requests no counterpart.

    The verdict is ``inconclusive`` where the same elements may be meant in an order that cannot be determined.
    """

    first: Draw | None
    second: Draw | None
    verdict: Verdict
    message: str

    def names(self) -> tuple[str, str]:
        """Return ``dropout NAME`` of the submodules that drop; where one side does not, the other's name."""
        ours, theirs = (one.path if one else "" for one in (self.first, self.second))
        return f"dropout {ours or theirs}".strip(), f"dropout {theirs or ours}".strip()


def differences(
    first: Sequence[Draw], second: Sequence[Draw], labels: tuple[str, str] = ("torch", "flax")
) -> list[Difference]:
    """Compare the masks that the two sides requested: shapes, rates and counts."""
    ours, theirs = _by_shape(first), _by_shape(second)
    differing, spare, other = [], [], []
    for sizes in dict.fromkeys([*ours, *theirs]):
        mine, its = ours[sizes], theirs[sizes]
        for draw, match in zip(mine, its, strict=False):
            if draw.rate != match.rate:
                message = (
                    f"masks of shape {draw.shape}: rate {draw.rate:.4g} in {labels[0]}, {match.rate:.4g} in {labels[1]}"
                )
                differing.append(Difference(draw, match, "different", message))
        spare += mine[len(its) :]
        other += its[len(mine) :]
    for draw in spare:
        counterpart, verdict, message = _counterpart(draw, other, labels)
        if counterpart is not None:
            other.remove(counterpart)
        differing.append(Difference(draw, counterpart, verdict, message))
    ours_only, theirs_only = labels
    return differing + [
        Difference(None, one, "different", f"{theirs_only} draws a mask of {one}, {ours_only} none") for one in other
    ]


def _counterpart(draw: Draw, others: Sequence[Draw], labels: tuple[str, str]) -> tuple[Draw | None, Verdict, str]:
    """Find the second side's mask that one of the first without its like was meant to be."""
    for other in others:
        sides = {labels[1]: (other, draw, labels[0]), labels[0]: (draw, other, labels[1])}
        for side, (shared, whole, whole_side) in sides.items():
            axes = _shared(shared.shape, whole.shape)
            if axes:
                of = f" ({shared.setting})" if shared.setting else ""
                message = (
                    f"the mask is shared over {axes} in {side}{of}: {shared.shape}; {whole_side} draws {whole.shape}"
                )
                return other, "different", message
    for other in others:
        if other.size == draw.size:
            message = (
                f"the masks hold as many elements, in an order that can't be told: {draw.shape} in {labels[0]}, "
                f"{other.shape} in {labels[1]}; have both sides drop arrays of the same axes"
            )
            return other, "inconclusive", message
    return None, "different", f"{labels[0]} draws a mask of {draw}, {labels[1]} none"


def _shared(part: Shape, whole: Shape) -> str:
    """Name the axes over which a mask broadcasts to a shape; empty if it does not broadcast or no axis differs."""
    leading = part[: max((axis + 1 for axis, size in enumerate(part) if size != 1), default=0)]
    names = _AXES if len(whole) == len(_AXES) else tuple(f"axis {axis}" for axis in range(len(whole)))
    for padded in ((1,) * (len(whole) - len(part)) + part, leading + (1,) * (len(whole) - len(leading))):
        if len(padded) == len(whole) and all(one in (1, two) for one, two in zip(padded, whole, strict=True)):
            return " and ".join(names[axis] for axis, one in enumerate(padded) if one != whole[axis])
    return ""


def _order(shape: Shape) -> list[int]:
    """Return the axes that are not 1, by size."""
    return sorted((axis for axis, size in enumerate(shape) if size != 1), key=lambda axis: shape[axis])


def _by_shape(draws: Sequence[Draw]) -> dict[Shape, list[Draw]]:
    draws_of: dict[Shape, list[Draw]] = collections.defaultdict(list)
    for draw in draws:
        draws_of[tuple(draw.shape[axis] for axis in _order(draw.shape))].append(draw)
    return draws_of
