"""What the adapters of promotion share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

X = np.array([0.12345678901234567, 0.7654321987654321, -1.1111111111111112])
"""The input of every way to ask for less; none of its numbers fits into float32."""

THIRD = 1.0 / 3.0
Exact = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
"""Outputs, and the gradients of the input."""


class PlannedError(Exception):
    """Raised by a test itself."""


def third(x: Any) -> Any:
    """Return a third of an array of any framework."""
    return x * THIRD


def cotangent_like(output: Any) -> np.ndarray:
    """Return a cotangent of an output's shape."""
    return np.random.default_rng(1).normal(size=output.shape)
