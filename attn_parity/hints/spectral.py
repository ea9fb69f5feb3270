"""Spectral norms: torch divides by u W v of stored vectors, Flax takes a step of power iteration from u first."""

from __future__ import annotations

import numpy as np

from .case import Array, Case, ratio_of

CLOSE = 1e-5
"""How near a factor is to one over a norm; Flax adds 1e-12 to lengths, and stored vectors are float32."""


def spectral(case: Case) -> str:
    """Recognise a weight that one side alone divides by its norm after a step of power iteration."""
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
                    "another number: consistent with stored vectors, which give the same where they are singular ones"
                )
    return ""


def _is_divided(case: Case, product: Array, side: Array, norm: float) -> bool:
    """Return whether a side is a product divided by a norm, plus a bias that the place holds or none."""
    if product.shape != side.shape:
        return False
    biases = [np.zeros(()), *(one for one in case.weights.values() if one.shape == side.shape[-1:])]
    ratios = (ratio_of(product, side - bias) for bias in biases)
    return any(ratio is not None and abs(ratio * norm - 1.0) < CLOSE for ratio in ratios)


def _normalised(vector: Array) -> Array:
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12))
