"""Measure how far a fault changes the function that it is planted in, on one side alone.

A fault may be real and yet change nothing: a key bias cancels in softmax, positions count only relative to each other,
a fill of -1e4 matters where a row sees nothing. Whether a judge that returns ``equal`` missed something can't be left
to the judge, nor to a declaration: the right and the wrong function of the same framework are run on the same numbers
and compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from attn_parity.sides.subject import Arguments, Array, Arrays

INVARIANT = 1e-14
"""Relative change in float64 up to which two functions are the same ..."""

NOISE_FACTOR = 100.0
"""... or up to this many times what moving all numbers by one unit in the last place of float64 does."""

LOSS_LIMIT = 4.0
"""Two right implementations differ in rounding error by up to 2.3 times (root mean square over 2448 tensors)."""

Effect = Literal["meaning", "precision", "none"]


@dataclasses.dataclass(frozen=True)
class Change:
    """The effect of a fault.

    Attributes:
        forward: largest change of an output in float64, relative to the largest output.
        backward: largest change of a gradient in float64, relative to the largest of its kind.
        noise: the change of outputs and gradients when all numbers move by one unit in the last place.
        loss: ratio of the wrong function's rounding error in float32 to that of the right one; None if the meaning
            changes.
    """

    forward: float
    backward: float
    noise: float
    loss: float | None = None

    @property
    def limit(self) -> float:
        """Change in float64 up to which the two functions are the same."""
        return max(INVARIANT, NOISE_FACTOR * self.noise)

    @property
    def changes_meaning(self) -> bool:
        """Whether the two functions differ in float64."""
        return not max(self.forward, self.backward) <= self.limit

    @property
    def effect(self) -> Effect:
        """Whether it changes the meaning, only costs precision, or does neither."""
        if self.changes_meaning:
            return "meaning"
        return "precision" if self.loss is not None and not self.loss <= LOSS_LIMIT else "none"


@dataclasses.dataclass(frozen=True)
class Numbers:
    """One set of numbers: the weights of the right and of the wrong module by name, arguments and cotangents."""

    right: Arrays
    wrong: Arrays
    inputs: Mapping[str, Array]
    cotangents: Sequence[Array]


def measure_change(right: object, wrong: object, numbers: Sequence[Numbers]) -> Change:
    """Compare two modules of one framework.

    Args:
        right: runner of the right module.
        wrong: runner of the wrong one.
        numbers: the sets of numbers to run both on.
    """
    forward = backward = noise = 0.0
    truths = []
    for number_set in numbers:
        truth = _run(right, number_set.right, number_set.inputs, number_set.cotangents, "float64")
        truths.append(truth)
        other = _run(wrong, number_set.wrong, number_set.inputs, number_set.cotangents, "float64")
        changes = _relative(truth, other)
        forward = max(forward, changes.pop("output"))
        backward = max(backward, *changes.values())
        noisy = _run(right, _nudged(number_set.right), _nudged(number_set.inputs), number_set.cotangents, "float64")
        noise = max(noise, *_relative(truth, noisy).values())
    change = Change(forward, backward, noise)
    if change.changes_meaning:
        return change
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number_set, truth in zip(numbers, truths, strict=True):
        low = _run(right, number_set.right, number_set.inputs, number_set.cotangents, None)
        lossy = _run(wrong, number_set.wrong, number_set.inputs, number_set.cotangents, None)
        for key, exact in truth.items():
            scale = float(np.abs(exact).max(initial=0.0)) or _scale(truth, key[0])
            unit = float(np.finfo(np.float32).eps) * scale or 1.0
            pair = [_mean_square((array[key] - exact) / unit) for array in (low, lossy)]
            errors.setdefault(key, []).append((pair[0], pair[1]))
    losses = []
    for error_pairs in errors.values():
        normal, more = (math.sqrt(sum(column) / len(error_pairs)) for column in zip(*error_pairs, strict=True))
        losses.append(more / (normal + 0.5))
    return dataclasses.replace(change, loss=max(losses))


def _run(
    runner: Any, weights: Mapping[str, Array], inputs: Mapping[str, Array], cotangents: Sequence[Array], dtype: Any
) -> dict[tuple[str, str], Array]:
    """Return (kind, name) -> result."""
    cotangents = [one if dtype else one.astype(np.float32) for one in cotangents]
    run = runner.run(weights, Arguments((), dict(inputs)), cotangents, dtype=dtype)
    arrays = {("output", str(i)): output for i, output in enumerate(run.outputs)}
    arrays |= {("input", str(i)): one for i, one in enumerate(run.input_gradients) if one is not None}
    for name, gradient in run.parameter_gradients.items():
        arrays["matrix" if gradient.ndim > 1 else "vector", name] = gradient
    return {key: array.astype(np.float64) for key, array in arrays.items()}


def _relative(truth: Mapping[tuple[str, str], Array], other: Mapping[tuple[str, str], Array]) -> dict[str, float]:
    """Return kind -> largest difference, relative to the largest value of the kind."""
    differences: dict[str, float] = {}
    for key, exact in truth.items():
        apart = float(np.abs(exact - other[key]).max(initial=0.0))
        part = apart / (_scale(truth, key[0]) or 1.0)
        differences[key[0]] = max(differences.get(key[0], 0.0), math.inf if math.isnan(part) else part)
    return differences


def _scale(results: Mapping[tuple[str, str], Array], kind: str) -> float:
    return max(float(np.abs(array).max(initial=0.0)) for key, array in results.items() if key[0] == kind)


def _mean_square(array: Array) -> float:
    value = float(np.mean(array * array)) if array.size else 0.0
    return value if math.isfinite(value) else math.inf


def _nudged(arrays: Mapping[str, Array]) -> Arrays:
    """Return the arrays in float64, every number one unit in the last place further from or nearer to zero."""
    random = np.random.default_rng(6)
    return {
        name: array * (1.0 + random.choice([-1.0, 1.0], size=array.shape) * np.finfo(np.float64).eps)
        if array.dtype.kind == "f"
        else array
        for name, array in arrays.items()
    }
