"""The free runs: both sides train on, each from its own numbers, and may drift apart as rounding does.

Both run in their own precision and in float64; the distance that grows between them is compared with the growth of one
unit in the last place of the first weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..pair import Pair
from ..pairing import Pairing
from ..results.findings import Verdict
from ..sides.arrays import is_float, numpy_dtype, unit_of, wide
from ..sides.dropout_masks import Masks
from ..sides.subject import Arguments, Array, Arrays
from .stepping import SIDE_OF, State, Step

LOSS_LIMIT = 1e-9
"""Relative difference of two float64 losses that is allowed, whatever one unit in the last place grows to."""

# Weights of the right pairs that the tests train drift by up to 2.5 times the growth, those of faulty ones by 30,000
# times and more.
DRIFT_FACTOR = 100.0
"""Free float64 runs may drift apart by this many times the growth of one unit in the last place."""

# In the tests right pairs drift by up to 5.2 times as much, those that lose precision by 108 times and more.
GROWTH_FACTOR = 30.0
"""Allowed drift of a free run from its float64 run, in multiples of the other side's or of the growth of one unit."""


@dataclasses.dataclass
class FreeRun:
    """One free run: its trainer, weights and optimizer state as they are now."""

    trainer: Any
    side: str
    weights: Arrays
    state: State
    losses: list[float] = dataclasses.field(default_factory=list)

    def step(self, arguments: Arguments, targets: object, masks: Masks) -> Step:
        """Take a step."""
        step: Step = self.trainer.gradients(self.weights, arguments, targets, masks)
        self.weights, self.state = self.trainer.update({**self.weights, **step.statistics}, step.gradients, self.state)
        self.losses.append(float(wide(step.loss)))
        return step


def start(
    pair: Pair, low: Sequence[Any], exact: Sequence[object], initial_weights: Arrays, seed: int
) -> dict[str, FreeRun]:
    """Return all free runs by name, before their first step.

    Args:
        pair: both sides.
        low: the trainers of both in the precision of the training.
        exact: those in float64; the same where that is the precision.
        initial_weights: the first weights, with torch names.
        seed: of the move by one unit in the last place.
    """

    def free_run(trainer: Any, weights: Arrays) -> FreeRun:
        if trainer.framework == "flax":
            converted = pair.pairing.to_second(weights)
            weights = {name: converted.get(name, one) for name, one in pair.own_weights["second"].items()}
        weights = cast(weights, trainer.precision) if trainer.precision else weights
        return FreeRun(trainer, trainer.framework, weights, trainer.first_state())

    runs = {"torch": free_run(low[0], initial_weights), "flax": free_run(low[1], initial_weights)}
    runs["torch moved"] = free_run(low[0], _one_ulp(initial_weights, seed, pair.kept))
    if low is not exact:
        runs["torch float64"] = free_run(exact[0], initial_weights)
        runs["flax float64"] = free_run(exact[1], initial_weights)
        runs["torch float64 moved"] = free_run(exact[0], _one_ulp(cast(initial_weights, "float64"), seed, pair.kept))
    return runs


def pairs_of(runs: Mapping[str, FreeRun]) -> list[tuple[str, str]]:
    """Return the names of the runs whose distance is followed."""
    pairs = [("torch", "flax"), ("torch", "torch moved")]
    if "torch float64" in runs:
        pairs += [("torch", "torch float64"), ("flax", "flax float64")]
        pairs += [("torch float64", "flax float64"), ("torch float64", "torch float64 moved")]
    return pairs


def distance(pairing: Pairing, first_run: FreeRun, second_run: FreeRun) -> float:
    """Return the distance of the weights of two runs, relative to the weights."""
    first, second = (pairing.aligned(run.weights, SIDE_OF[run.side]) for run in (first_run, second_run))
    first = {name: array.astype(np.float64) for name, array in first.items()}
    square = sum(float(np.square(array - second[name]).sum()) for name, array in first.items())
    whole = sum(float(np.square(array).sum()) for array in first.values())
    return math.sqrt(square / whole) if whole and math.isfinite(square / whole) else math.inf if square else 0.0


def drift(
    losses: Mapping[str, Sequence[float]], growth: Mapping[str, Sequence[float]], dtype: str
) -> tuple[Verdict, int, str]:
    """Judge the free runs by losses and distances: verdict, number of the step, and what drifts."""
    is_precise = dtype == "float64"
    first_name, second_name = ("torch", "flax") if is_precise else ("torch float64", "flax float64")
    moved = f"{first_name} moved"
    apart, noise = growth[f"{first_name} and {second_name}"], np.maximum.accumulate(growth[f"{first_name} and {moved}"])
    first, second, third = (np.array(losses[name]) for name in (first_name, second_name, moved))
    relative = _relative(first, second)
    of_noise = np.maximum.accumulate(_relative(first, third))
    for step in range(len(apart)):
        if not relative[step] <= max(LOSS_LIMIT, DRIFT_FACTOR * of_noise[step]):
            message = (
                f"the float64 losses of free runs differ by {relative[step]:.2g}, one unit in the last place of "
                f"the first weights makes {of_noise[step]:.2g}"
            )
            return "different", step + 1, message
        if not apart[step] <= DRIFT_FACTOR * max(noise[step], np.finfo(np.float64).eps):
            message = (
                f"the float64 weights of free runs are {apart[step]:.2g} apart, one unit in the last place of the "
                f"first weights makes {noise[step]:.2g}"
            )
            return "different", step + 1, message
    if is_precise:
        return "equal", 0, ""
    eps = unit_of(dtype)
    drifts = {side: np.array(growth[f"{side} and {side} float64"]) for side in ("torch", "flax")}
    common = np.maximum.accumulate(growth["torch and torch moved"])
    for side, other in (("torch", "flax"), ("flax", "torch")):
        allowed = GROWTH_FACTOR * np.maximum(np.maximum.accumulate(np.maximum(drifts[other], common)), eps)
        beyond = ~(drifts[side] <= allowed)
        if beyond.any():
            step = int(np.argmax(beyond))
            return (
                "precision",
                step + 1,
                f"from step {step + 1} on {side} drifts from its float64 run by {drifts[side][step]:.2g}, "
                f"{GROWTH_FACTOR:g} times the drift of the other side or of one unit in the last place is "
                f"{allowed[step]:.2g}",
            )
    return "equal", 0, ""


def cast(arrays: Mapping[str, Array], dtype: str) -> Arrays:
    """Return arrays in another precision; whole numbers as they are."""
    return {name: one.astype(numpy_dtype(dtype)) if is_float(one) else one for name, one in arrays.items()}


def _one_ulp(arrays: Mapping[str, Array], seed: int, kept: Collection[str]) -> Arrays:
    """Return the weights, all but those in `kept`, moved by one unit in the last place, up or down at random."""
    random = np.random.default_rng((seed, 1))
    moved = {}
    for name, array in arrays.items():
        moved[name] = array
        if is_float(array) and name not in kept:
            eps = unit_of(array.dtype.name)
            sign = random.integers(0, 2, array.shape) * 2 - 1
            moved[name] = (wide(array) * (1.0 + eps * sign)).astype(array.dtype)
    return moved


def _relative(first: Array, second: Array) -> Array:
    scale = np.maximum(np.abs(first), np.finfo(np.float64).tiny)
    apart: Array = np.where(
        (first == second) | (np.isnan(first) & np.isnan(second)), 0.0, np.abs(first - second) / scale
    )
    return apart
