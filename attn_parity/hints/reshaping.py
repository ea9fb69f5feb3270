"""Operations that reduce, resize, pad or modulate an input: the way that gives each side's numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from .case import Array, Case, Ways

MAX_CHUNKS = 6
"""Most parts of a modulation: shift, scale and gate of two branches (adaLN, arXiv 2212.09748)."""

MODES: dict[str, Literal["constant", "edge", "reflect", "wrap"]] = {
    "zeros": "constant",
    "repeated edges": "edge",
    "reflections": "reflect",
    "the other end": "wrap",
}

Matrix = Callable[[int, int], Array]
"""From the sizes before and after to the matrix of a resizing along one axis."""


def softmaxes(case: Case) -> Ways:
    """Yield softmaxes over every axis."""
    for operand in case.inputs:
        if operand.shape != case.first.shape:
            continue
        for axis in range(operand.ndim - 1, -1, -1):
            shifted = operand - operand.max(axis=axis, keepdims=True)
            total = np.exp(shifted).sum(axis=axis, keepdims=True)
            yield f"a softmax over axis {axis} of {operand.ndim}", np.exp(shifted) / total
            yield f"a log-softmax over axis {axis} of {operand.ndim}", shifted - np.log(total)


# ---- reductions


def reductions(case: Case) -> Ways:
    """Yield reductions of some axes: a mean, a sum, a maximum, or one of the rows."""
    for position, operand in enumerate(case.inputs):
        which = f"input {position}" if len(case.inputs) > 1 else "the input"
        for axes in _subsets(operand.ndim):
            after = tuple(size for axis, size in enumerate(operand.shape) if axis not in axes)
            kept = tuple(1 if axis in axes else size for axis, size in enumerate(operand.shape))
            if kept != case.first.shape and after != tuple(
                size for size in case.first.shape if size != 1 or size in after
            ):
                continue
            over = f"of {which} over {'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"
            made = {"the mean": operand.mean(axes), "the sum": operand.sum(axes), "the maximum": operand.max(axes)}
            if len(axes) == 1:
                made |= {"the first": operand.take(0, axes[0]), "the last": operand.take(-1, axes[0])}
            for name, value in made.items():
                yield f"{name} {over}", value.reshape(case.first.shape)


def _subsets(ndim: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, min(ndim, 4) + 1):
        yield from itertools.combinations(range(ndim), count)


# ---- resizing


def _linear(aligned: bool) -> Matrix:
    def matrix(size: int, new: int) -> Array:
        at = _places(size, new, aligned)
        low = np.clip(np.floor(at).astype(int), 0, size - 1)
        high = np.minimum(low + 1, size - 1)
        part = np.clip(at, 0, size - 1) - low
        made = np.zeros((new, size))
        np.add.at(made, (np.arange(new), low), 1 - part)
        np.add.at(made, (np.arange(new), high), part)
        return made

    return matrix


def _cubic(aligned: bool, sharpness: float, clamped: bool) -> Matrix:
    """Return Keys's cubic filter (IEEE TASSP 29, 1981): torch's sharpness is -0.75, jax.image's -0.5.

    Places beyond the edge repeat it in torch; jax.image leaves them out and divides by the weights that are left.
    """

    def matrix(size: int, new: int) -> Array:
        at = _places(size, new, aligned)
        made = np.zeros((new, size))
        for step in range(-1, 3):
            index = np.floor(at).astype(int) + step
            far = np.abs(at - index)
            near = ((sharpness + 2) * far - (sharpness + 3)) * far * far + 1
            wide = ((far - 5) * far + 8) * far * sharpness - 4 * sharpness
            weight = np.where(far <= 1, near, np.where(far < 2, wide, 0.0))
            inside = (index >= 0) & (index < size)
            weight = weight if clamped else weight * inside
            np.add.at(made, (np.arange(new), np.clip(index, 0, size - 1)), weight)
        return np.asarray(made / made.sum(1, keepdims=True))

    return matrix


def _antialiased(size: int, new: int) -> Array:
    """Return linear weights over as many pixels as become one."""
    scale = max(size / new, 1.0)
    weight = np.maximum(0.0, 1 - np.abs(_places(size, new, False)[:, None] - np.arange(size)) / scale)
    return np.asarray(weight / weight.sum(1, keepdims=True))


def _nearest(exact: bool) -> Matrix:
    def matrix(size: int, new: int) -> Array:
        at = (np.arange(new) + 0.5 * exact) * size / new
        return np.asarray(np.eye(size)[np.clip(np.floor(at).astype(int), 0, size - 1)])

    return matrix


def _places(size: int, new: int, aligned: bool) -> Array:
    if aligned:
        return np.linspace(0, size - 1, new) if new > 1 else np.zeros(1)
    return (np.arange(new) + 0.5) * size / new - 0.5


RESIZINGS: dict[str, Matrix] = {
    "linear resizing, corners not aligned": _linear(False),
    "linear resizing, corners aligned": _linear(True),
    "linear resizing with antialiasing": _antialiased,
    "nearest resizing": _nearest(False),
    "nearest resizing by centres of pixels": _nearest(True),
    "cubic resizing, corners not aligned": _cubic(False, -0.75, True),
    "cubic resizing, corners aligned": _cubic(True, -0.75, True),
    "cubic resizing of sharpness -0.5": _cubic(False, -0.5, False),
}
"""The usual ones first: torch's `interpolate` and `jax.image.resize`."""


def resized(case: Case) -> Ways:
    """Yield inputs resized, with corners aligned or not, by several filters, or with a resized table added."""
    for operand in case.inputs:
        if operand.ndim != case.first.ndim or operand.ndim not in (3, 4):
            continue
        for axes in ((2, 3), (1, 2)) if operand.ndim == 4 else ((2,), (1,)):
            rest = [axis for axis in range(operand.ndim) if axis not in axes]
            if any(operand.shape[axis] != case.first.shape[axis] for axis in rest) or operand.shape == case.first.shape:
                continue
            for name, matrix in RESIZINGS.items():
                made = operand
                for axis in axes:
                    moved = np.moveaxis(made, axis, -1) @ matrix(operand.shape[axis], case.first.shape[axis]).T
                    made = np.moveaxis(moved, -1, axis)
                yield name, made
    yield from _tables(case)


def _tables(case: Case) -> Ways:
    """Yield inputs with a square table of positions added that is resized to their length, a class token kept."""
    if case.first.ndim != 3:
        return
    length, width = case.first.shape[1:]
    for operand in (given for given in case.inputs if given.shape == case.first.shape):
        for name, table in case.weights.items():
            if table.ndim not in (2, 3) or table.shape[-1] != width or table.size // width == length:
                continue
            rows = table.reshape(-1, width)
            for kept in (0, 1):
                if min(len(rows), length) <= kept:  # a class token alone is no table
                    continue
                old, new = math.isqrt(len(rows) - kept), math.isqrt(length - kept)
                if old * old != len(rows) - kept or new * new != length - kept:
                    continue
                for kind, matrix in RESIZINGS.items():
                    grid = rows[kept:].reshape(old, old, width)
                    grid = np.einsum("ai,bj,ijc->abc", matrix(old, new), matrix(old, new), grid)
                    made = np.concatenate([rows[:kept], grid.reshape(-1, width)])
                    yield f"{kind} of {name}", operand + made


# ---- padding and modulation


def padded(case: Case) -> Ways:
    """Yield inputs that are padded on some sides, with some values."""
    for operand in case.inputs:
        if operand.ndim != case.first.ndim or operand.size >= case.first.size:
            continue
        grown = [new - old for old, new in zip(operand.shape, case.first.shape, strict=True)]
        if min(grown) < 0 or sum(1 for more in grown if more) > 2:
            continue
        for before in itertools.product(*(range(more + 1) for more in grown)):
            pads = [(low, more - low) for low, more in zip(before, grown, strict=True)]
            for name, mode in MODES.items():
                if mode in ("reflect", "wrap") and any(
                    max(pad) >= size for pad, size in zip(pads, operand.shape, strict=True)
                ):
                    continue
                sides = ", ".join(f"{pad} of axis {axis}" for axis, pad in enumerate(pads) if any(pad))
                yield f"padding with {name} by {sides}", np.pad(operand, pads, mode=mode)


def modulated(case: Case) -> Ways:
    """Yield an input scaled and shifted by parts of other inputs, in either role."""
    if case.first.ndim < 2:
        return
    size = case.first.shape[-1]
    for operand in (given for given in case.inputs if given.shape == case.first.shape):
        parts: dict[str, Array] = {}
        for position, other in enumerate(case.inputs):
            if other is operand or other.ndim < 2 or other.ndim > case.first.ndim or other.shape[-1] % size:
                continue
            wide = other.reshape(len(other), *([1] * (case.first.ndim - other.ndim)), *other.shape[1:])
            count = other.shape[-1] // size
            if any(a not in (1, b) for a, b in zip(wide.shape[:-1], case.first.shape[:-1], strict=True)):
                continue
            if count <= MAX_CHUNKS:
                of = f" of {count} of input {position}" if count > 1 else ""
                chunks = np.split(wide, count, axis=-1)
                parts |= {f"part {at}{of}" if of else f"input {position}": one for at, one in enumerate(chunks)}
        for (scale, chunk), (shift, other_chunk) in itertools.permutations(parts.items(), 2):
            yield (
                f"x * (1 + scale) + shift with {scale} as scale, {shift} as shift",
                operand * (1 + chunk) + other_chunk,
            )
            yield f"x * scale + shift with {scale} as scale, {shift} as shift", operand * chunk + other_chunk
