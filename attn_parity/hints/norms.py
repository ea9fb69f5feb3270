"""Norms of one input as ports write them: each side's statistic, eps and affine step, recovered from its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .case import Array, Case, Ways, first_fit, ratio_of

LARGEST = 1 << 20
"""Most elements of an output that norms are fitted to."""

RESOLVED = 1e-13
"""Smallest eps that shows, relative to the variance: a few units of float64."""

CONSTANT = 1e-5
"""Largest spread of a fitted eps, relative to it."""

VARIED = 1e-3
"""Smallest relative spread of variances that separates an eps from a factor."""

LARGEST_GROUPED = 1 << 15
"""Most elements of an output that norms of groups of channels are computed for."""

SPECTRAL = 1e-5
"""How near a factor is to one over a spectral norm; Flax adds 1e-12 to lengths, and stored vectors are float32."""

EPS = (1e-5, 1e-6, 1e-3)
"""The eps of torch, Flax and Keras."""

MAX_VECTORS = 2
"""Most weights and biases that a norm has."""


class Affine(NamedTuple):
    """The affine step that follows normalisation.

    Attributes:
        scale: the factor.
        shift: the addend.
        text: both, as the end of a formula.
    """

    scale: Array
    shift: Array
    text: str


class NormAxes(NamedTuple):
    """Axes of a norm: those of its statistics, and the axis of weight and bias.

    Attributes:
        axes: of the statistics.
        channels: the axis of weight and bias.
        text: names the axes unless they are the last alone; else "".
        groups: number of channel groups with separate statistics, if `axes` include the channels.
        is_strided: whether a group is every ``groups``-th channel instead of contiguous channels.
    """

    axes: tuple[int, ...]
    channels: int
    text: str
    groups: int = 1
    is_strided: bool = False

    def mean(self, array: Array) -> Array:
        """Return the mean over the axes, in a shape that can be taken off the array."""
        if self.groups == 1:
            return np.asarray(array.mean(axis=self.axes, keepdims=True))
        at, size = self.channels, array.shape[self.channels] // self.groups
        inner = (size, self.groups) if self.is_strided else (self.groups, size)
        apart = array.reshape(*array.shape[:at], *inner, *array.shape[at + 1 :])
        axes = [axis + (axis > at) for axis in self.axes if axis != at] + [at if self.is_strided else at + 1]
        means = np.broadcast_to(apart.mean(axis=tuple(axes), keepdims=True), apart.shape)
        return np.asarray(means.reshape(array.shape))


def norms(case: Case) -> str:
    """Recognise two norms of one input: another eps or variance, weight and bias exchanged or left out."""
    if case.is_gradient or case.first.ndim < 2 or case.first.size > LARGEST:
        return ""
    for operand in (one for one in case.inputs[::-1] if one.shape == case.first.shape):
        for layout in _layouts(case.first.ndim):
            first = _formula(case, operand, case.first, layout)
            second = _formula(case, operand, case.second, layout) if first else ""
            if first and second and first != second:
                return f"{case.labels[0]} computes {first}, {case.labels[1]} {second}{layout.text}"
        if case.first.size <= LARGEST_GROUPED and all(one.ndim == 1 for one in case.weights.values()):
            text = first_fit(case, _grouped(case, operand))
            if text:
                return text
    return ""


def _grouped(case: Case, operand: Array) -> Ways:
    """Yield norms over groups of channels, with the eps that most have."""
    for channels in dict.fromkeys((case.first.ndim - 1, 1)):
        size = case.first.shape[channels]
        axes = tuple(range(1, case.first.ndim))
        for groups, is_strided in itertools.product(range(1, size + 1), (False, True)):
            if size % groups or (is_strided and groups in (1, size)):
                continue
            layout = NormAxes(axes, channels, "", groups, is_strided)
            centred = operand - layout.mean(operand)
            variance = layout.mean(np.square(centred))
            which = f"{groups} groups of {'every so many' if is_strided else 'neighbouring'} channels"
            for affine, eps in itertools.product(_affines(case, layout), EPS):
                made = centred / np.sqrt(variance + eps) * affine.scale + affine.shift
                yield f"(x - mean) / sqrt(var + {eps:g}){affine.text} over {which}", made


def _layouts(ndim: int) -> Iterator[NormAxes]:
    yield NormAxes((ndim - 1,), ndim - 1, "")
    for channels in dict.fromkeys((1, ndim - 1)):
        spatial = tuple(axis for axis in range(1, ndim) if axis != channels)
        for axes in ((channels,), spatial, (0, *spatial), tuple(range(1, ndim))):
            if axes and (axes, channels) != ((ndim - 1,), ndim - 1):
                yield NormAxes(axes, channels, f" (statistics over axes {', '.join(map(str, sorted(axes)))})")


def _formula(case: Case, operand: Array, made: Array, layout: NormAxes) -> str:
    """Return the norm of an input that gives an output; "" if none does."""
    centred = operand - operand.mean(axis=layout.axes, keepdims=True)
    count = math.prod(operand.shape[axis] for axis in layout.axes)
    for (name, variance, values), affine in itertools.product(
        (("(x - mean)", "var", centred), ("x", "mean(x^2)", operand)), _affines(case, layout)
    ):
        plain = (made - affine.shift) / affine.scale
        divisor = _divisor(values, plain, layout.axes)
        if divisor is None or not case.fits(values / divisor * affine.scale + affine.shift, made):
            continue
        below = _below(divisor, np.square(values).mean(axis=layout.axes, keepdims=True), count, variance)
        if below:
            return f"{name} / {below}{affine.text}"
    return ""


def _affines(case: Case, layout: NormAxes) -> Iterator[Affine]:
    """Yield the possible affine steps with the vectors of a norm, the most usual first."""
    size = case.first.shape[layout.channels]
    shape = [size if axis == layout.channels else 1 for axis in range(case.first.ndim)]
    vectors = {name: one.reshape(shape) for name, one in case.weights.items() if one.shape == (size,)}
    nothing, ones = np.zeros(shape), np.ones(shape)
    if len(vectors) <= MAX_VECTORS:
        names: Sequence[str] = sorted(vectors, key=lambda name: "bias" in name or "shift" in name or "beta" in name)
        for scale, shift in itertools.permutations(names, 2):
            yield Affine(vectors[scale], vectors[shift], f" * {scale} + {shift}")
        for name in names:
            yield Affine(vectors[name], nothing, f" * {name}")
        for name in names:
            for shift in (*(other for other in names if other != name), ""):
                added = f" + {shift}" if shift else ""
                yield Affine(1 + vectors[name], vectors.get(shift, nothing), f" * (1 + {name}){added}")
        for name in names:
            yield Affine(ones, vectors[name], f" + {name}")
    yield Affine(ones, nothing, "")


def _divisor(values: Array, plain: Array, axes: tuple[int, ...]) -> Array | None:
    """Return the divisor of values along some axes, by least squares; None where they are not multiples."""
    divisor = np.square(values).sum(axis=axes, keepdims=True) / (values * plain).sum(axis=axes, keepdims=True)
    return np.asarray(divisor) if np.isfinite(divisor).all() and (divisor > 0).all() else None


def _below(divisor: Array, squares: Array, count: int, variance: str) -> str:
    """Return the formula of a divisor: the root of a variance, with an eps under the root or added to it."""
    if divisor.size < 2 or float(np.ptp(squares)) <= VARIED * float(squares.max()):
        return ""
    deviation = {"var": "std"}.get(variance, "rms")
    kinds = [(1.0, variance, deviation)]
    if variance == "var" and count > 1:
        kinds.append((count / (count - 1), "var by n - 1", "std by n - 1"))
    kinds.append((float(count), "sum of squares", "norm"))
    for factor, inside, outside in kinds:
        close = RESOLVED * float(np.square(divisor).max())
        eps = _constant(np.square(divisor) - factor * squares, close)
        if eps is not None:
            return f"sqrt({inside} + {eps:.4g})" if eps else f"sqrt({inside})"
        eps = _constant(divisor - np.sqrt(factor * squares), RESOLVED * float(divisor.max()))
        if eps is not None:
            return f"({outside} + {eps:.4g})"
    return ""


def _constant(values: Array, close: float) -> float | None:
    """Return the number that all of some values are, 0 where they do not differ from it; None if they differ."""
    middle = float(np.median(values))
    if middle < -close or float(np.ptp(values)) > CONSTANT * abs(middle) + 10 * close:
        return None
    return middle if middle > 10 * close else 0.0


# ---- spectral norms


def spectral(case: Case) -> str:
    """Recognise a weight that one side alone divides by its norm after a step of power iteration.

    torch divides by u W v of stored vectors, Flax takes a step of power iteration from u first.
    """
    vectors = {
        name: one for name, one in case.weights.items() if one.ndim == 1 and name.rpartition(".")[2].endswith("u")
    }
    if case.is_gradient or not vectors or not case.first.ndim:
        return ""
    for name, start in vectors.items():
        for weight in (one for one in case.weights.values() if one.ndim == 2):
            matrix = weight if weight.shape[0] == start.size else weight.T
            operand = next((one for one in case.inputs if one.shape[-1:] == matrix.shape[1:]), None)
            if matrix.shape[0] != start.size or operand is None or case.first.shape[-1:] != start.shape:
                continue
            step = _normalised(start @ matrix)
            norm = float(_normalised(matrix @ step) @ matrix @ step)
            divided = [_is_divided(case, operand @ matrix.T, side, norm) for side in (case.first, case.second)]
            if divided.count(True) == 1:
                label, other = case.labels if divided[0] else case.labels[::-1]
                return (
                    f"{label} divides the weight by its norm after a step of power iteration from {name}, {other} by "
                    "another number"
                )
    return ""


def _is_divided(case: Case, product: Array, side: Array, norm: float) -> bool:
    """Return whether a side is a product divided by a norm, plus a bias that the place holds or none."""
    if product.shape != side.shape:
        return False
    biases = [np.zeros(()), *(one for one in case.weights.values() if one.shape == side.shape[-1:])]
    ratios = (ratio_of(product, side - bias) for bias in biases)
    return any(ratio is not None and abs(ratio * norm - 1.0) < SPECTRAL for ratio in ratios)


def _normalised(vector: Array) -> Array:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12))
