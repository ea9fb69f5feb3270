"""Gradients: the derivative along a direction equals the difference quotient of the outputs, in float64.

The quotient is central, and taken at several steps: one that converges to another number than the gradient shows a
wrong gradient; one that does not converge (a jump, a choice of the largest) shows nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from ..samples import calls
from ..samples.sampling import cotangents
from ..sides.arrays import is_float
from ..sides.subject import Arguments, Array
from .layout import Axes
from .side import SAME, Gap, LawResult, NotTriedError, OneSide

STEPS = (1e-5, 1e-6, 1e-7)
"""Steps relative to the numbers that move: truncation loses the square of a step, rounding 1e-16 divided by it."""

LIMIT = 1e-5
"""Largest difference from a quotient that converges, relative to the sum of the absolute terms of the derivative.

At a step of 1e-5 the truncation of a smooth function is of the size 1e-10 times its third derivative, the rounding
1e-16 / 1e-5 = 1e-11 times the outputs; a wrong factor or a missing term changes a gradient by far more.
"""

CONVERGED = 0.1
"""A quotient has converged if two steps change it by no more than this part of its distance from the gradient."""

GROUPS = 4
"""Groups of tensors that are moved together; those of a group that fails are moved one by one."""

MOST_ALONE = 24
"""Most tensors of a group that are moved one by one, those with the largest terms first."""


@dataclasses.dataclass(frozen=True)
class _Direction:
    """One tensor to move: its name, where it is, its gradient, and the direction."""

    name: str
    gradient: Array
    direction: Array
    position: int | None = None

    @property
    def magnitude(self) -> float:
        """Sum of the absolute terms of the derivative."""
        return float(np.abs(self.gradient.astype(np.float64) * self.direction).sum())


def gradients(side: OneSide, layout: Axes) -> LawResult:
    """Compare the gradient of each weight and input along a random direction with a difference quotient."""
    del layout
    if side.dtype != "float64":
        raise NotTriedError("difference quotients need float64, which the module has not")
    shapes = [("", one.shape, "float64" if is_float(one) else one.dtype.name) for one in side.base]
    if not any(is_float(one) and np.isfinite(one).all() for one in side.base):
        raise NotTriedError("no output is finite everywhere")
    slopes = cotangents(shapes, (side.seed, 51), "float64")
    slopes = [one * np.isfinite(base) if is_float(base) else one for one, base in zip(slopes, side.base, strict=True)]
    worst, count = _worst(side, slopes)
    remark = ""
    if count and worst.size > LIMIT and (detached := _detached(side, slopes)):
        slopes = [slope * (number not in detached) for number, slope in enumerate(slopes)]
        worst, count = _worst(side, slopes)
        remark = f"; {', '.join(side.structure[number] for number in sorted(detached))} without a gradient"
    if not count:
        raise NotTriedError("difference quotients do not converge: the outputs jump")
    if worst.size <= LIMIT:
        why = f"difference quotients of {count} weights and inputs{remark}"
        return LawResult(worst, why, is_broken=False, limit=LIMIT)
    why = "a gradient is not the derivative of the outputs"
    return LawResult(worst, why, "by the gradient, along a random direction", is_broken=True, limit=LIMIT)


def _worst(side: OneSide, slopes: list[Array]) -> tuple[Gap, int]:
    """Return the largest distance of a gradient from its quotient, and the number of tensors whose quotient converges.

    Raises:
        NotTriedError: nothing has a gradient.
    """
    moves = _directions(side, slopes)
    if not moves:
        raise NotTriedError("no weight and no input has a gradient")
    worst, count = SAME, 0
    for group in (moves[start::GROUPS] for start in range(min(GROUPS, len(moves)))):
        gap = _tried(side, group, slopes)
        if (gap is None or gap.size > LIMIT) and len(group) > 1:
            alone = sorted(group, key=lambda move: -move.magnitude)[:MOST_ALONE]
            gaps = [(move, _tried(side, [move], slopes)) for move in alone]
            measured = [one for _, one in gaps if one is not None]
            gap = max(measured, key=lambda gap_of_tensor: gap_of_tensor.size) if measured else None
            count += len(measured)
        elif gap is not None:
            count += len(group)
        worst = worst if gap is None else max(worst, gap, key=lambda gap_of_tensor: gap_of_tensor.size)
    return worst, count


def _detached(side: OneSide, slopes: list[Array]) -> set[int]:
    """Return the positions of the outputs behind the first that pass no gradient on.

    Models return states for the next call without their gradient, as XLNet its memories. A first output without a
    gradient is a fault.
    """
    floats = [number for number, base in enumerate(side.base) if is_float(base)]
    results = set()
    for number in floats[1:]:
        alone = [slope * (other == number) for other, slope in enumerate(slopes)]
        run = side.run(side.call, cotangents=alone)
        gradients_of_output = [*run.parameter_gradients.values(), *run.input_gradients]
        if not any(gradient is not None and np.any(gradient) for gradient in gradients_of_output):
            results.add(number)
    return results


def _directions(side: OneSide, slopes: list[Array]) -> list[_Direction]:
    run = side.run(side.call, cotangents=slopes)
    random = np.random.default_rng([side.seed, 61])
    results = []
    unmoved, undefined = _padding_rows(side), _own_gradients(side)
    for name, gradient in run.parameter_gradients.items():
        array = side.weights[name]
        if gradient.size and np.isfinite(gradient).all() and name not in undefined:
            direction = _direction(random, array)
            if name in unmoved:
                direction[unmoved[name]] = 0.0
            results.append(_Direction(name, gradient, direction))
    masks, names = calls.masks(side.call), side.call.named(side.names)
    pairs = zip(names, side.call.leaves, run.input_gradients, masks, strict=True)
    for position, (name, leaf, slope, is_mask) in enumerate(pairs):
        if slope is not None and not is_mask and is_float(leaf) and leaf.size and np.isfinite(slope).all():
            label = f"{name} (input)" if name in run.parameter_gradients else name
            results.append(_Direction(label, slope, _direction(random, leaf), position))
    return results


def _padding_rows(side: OneSide) -> dict[str, int]:
    """Return name of an embedding's table -> its row of padding, which gets no gradient by definition."""
    results = {}
    for path, settings in side.subject.settings().items():
        row = settings.get("padding_idx")
        if isinstance(row, int):
            results[f"{path}.weight".lstrip(".")] = row
    return results


def _own_gradients(side: OneSide) -> set[str]:
    """Return names of embeddings' tables whose gradient torch defines otherwise: it scales a table or its gradient."""
    return {
        f"{path}.weight".lstrip(".")
        for path, settings in side.subject.settings().items()
        if settings.get("max_norm") is not None or settings.get("scale_grad_by_freq") is True
    }


def _direction(random: np.random.Generator, array: Array) -> Array:
    """Return normal numbers of the size of an array's."""
    size = float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) or 1.0
    return np.asarray(random.normal(size=array.shape) * size)


def _tried(side: OneSide, moves: list[_Direction], slopes: list[Array]) -> Gap | None:
    """Return how far the gradient is from the quotient; None if the quotient does not converge."""
    slope = float(sum((move.gradient.astype(np.float64) * move.direction).sum() for move in moves))
    name = moves[0].name if len(moves) == 1 else f"{moves[0].name} and {len(moves) - 1} more"
    terms = sum(move.magnitude for move in moves)
    quotients: list[float] = []
    gap = SAME
    for step in STEPS:
        ahead, behind = (_outputs(side, moves, sign * step) for sign in (1.0, -1.0))
        with np.errstate(invalid="ignore"):
            change = [
                (one - two) / (2 * step) * weight
                for one, two, weight in zip(ahead, behind, slopes, strict=True)
                if is_float(one)
            ]
        change = [np.where(np.isfinite(one), one, 0.0) for one in change]
        quotients.append(float(sum(one.sum() for one in change)))
        scale = max(terms, float(sum(np.abs(one).sum() for one in change)))
        if not scale:
            return SAME
        # Sums that cancel leave the rounding of the outputs, divided by the step.
        floor = float(np.finfo(np.float64).eps) / step * _size(side, slopes) / scale
        gap = Gap(
            max(0.0, abs(slope - quotients[-1]) / scale - floor), f"the derivative by {name}", (), quotients[-1], slope
        )
        if gap.size <= LIMIT:
            return gap
    spread = min(abs(one - two) for one, two in itertools.pairwise(quotients))
    distance = min(abs(slope - quotient) for quotient in quotients)
    return gap if spread <= CONVERGED * distance else None


def _size(side: OneSide, slopes: list[Array]) -> float:
    pairs = zip(side.base, slopes, strict=True)
    return float(sum(np.abs(np.where(np.isfinite(one), one, 0.0) * two).sum() for one, two in pairs if is_float(one)))


def _outputs(side: OneSide, moves: list[_Direction], step: float) -> list[Array]:
    weights: Mapping[str, Array] = {
        **side.weights,
        **{m.name: side.weights[m.name].astype(np.float64) + step * m.direction for m in moves if m.position is None},
    }
    leaves = list(side.call.leaves)
    for move in moves:
        if move.position is not None:
            leaves[move.position] = leaves[move.position].astype(np.float64) + step * move.direction
    call: Arguments = side.call.with_leaves(leaves)
    return side.outputs(call, weights=weights)
