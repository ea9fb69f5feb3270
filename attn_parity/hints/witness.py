"""The element at which the results of a place are furthest apart, both numbers, and the input there.

In: an `Evidence`. Out: one line, for readers who have the report and not the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..results.findings import shown
from .case import Array
from .evidence import Evidence

FEW = 6
"""Numbers of an input that a witness shows."""


def witness(evidence: Evidence) -> str:
    """Return the element that is furthest off when both sides are fed the same numbers; "" where no element is."""
    worst = max(_furthest(evidence), key=lambda entry: entry[0], default=None)
    if worst is None:
        return ""
    _, name, index, first, second = worst
    labels = (shown(label) for label in evidence.labels)
    numbers = ", ".join(f"{label} {value:.7g}" for label, value in zip(labels, (first, second), strict=True))
    at = f" at ({', '.join(map(str, index))})" if index else ""
    inputs = _inputs(evidence, index) if evidence.direction == "forward" else ""
    return f"{name}{at}: {numbers}{f'; {inputs}' if inputs else ''}"


def _furthest(evidence: Evidence) -> Iterator[tuple[float, str, tuple[int, ...], float, float]]:
    """Yield of each result the difference relative to its largest value, its name, the index, and both numbers."""
    if evidence.direction == "forward":
        many = len(evidence.first_outputs) > 1
        pairs = [
            (f"output[{number}]" if many else "output", ours, theirs)
            for number, (ours, theirs) in enumerate(zip(evidence.first_outputs, evidence.second_outputs, strict=False))
        ]
    else:
        shared = [name for name in evidence.first_gradients if name in evidence.second_gradients]
        pairs = [
            (f"gradient of {name}", evidence.first_gradients[name], evidence.second_gradients[name]) for name in shared
        ]
    for name, ours, theirs in pairs:
        if ours.shape != theirs.shape or not ours.size or not np.issubdtype(ours.dtype, np.floating):
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(ours - theirs)
            scale = float(np.max(np.abs(np.where(np.isfinite(ours), ours, 0.0)))) or 1.0
        # A number on one side only is the furthest off; where both have none they agree.
        gap = np.where(np.isfinite(ours) & np.isfinite(theirs), gap, np.where(_same(ours, theirs), 0.0, np.inf))
        index = tuple(map(int, np.unravel_index(int(np.argmax(gap)), gap.shape)))
        if gap[index] > 0:
            yield float(gap[index]) / scale, name, index, float(ours[index]), float(theirs[index])


def _same(first: Array, second: Array) -> Array:
    return np.asarray((np.isnan(first) & np.isnan(second)) | (first == second))


def _inputs(evidence: Evidence, index: tuple[int, ...]) -> str:
    """Return the numbers of the first input at the longest part of an index that both share."""
    for number, array in enumerate(evidence.inputs):
        shared = 0
        while shared < min(len(index), array.ndim - 1) and index[shared] < array.shape[shared]:
            shared += 1
        row = np.asarray(array[index[:shared]]).reshape(-1)
        if not row.size:
            continue
        values = ", ".join(f"{value:.4g}" for value in row[:FEW])
        more = f", ... ({row.size} numbers, rms {np.sqrt(np.mean(np.square(row))):.3g})" if row.size > FEW else ""
        at = f" at ({', '.join(map(str, index[:shared]))})" if shared else ""
        return f"input {number}{at}: {values}{more}"
    return ""
