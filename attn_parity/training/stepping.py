"""Data that the judge of training exchanges with the trainers of both backends: steps and optimizer states."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..results.findings import Side
from ..sides.subject import Array, Arrays

SIDE_OF: dict[str, Side] = {"torch": "first", "flax": "second"}
"""Framework -> the side of the pair that it is."""


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Numbers of the named optimizers, the same on both sides.

    Attributes:
        lr: learning rate.
        momentum: of ``momentum``; its buffer is ``momentum * buffer + gradient``, the step ``lr * buffer``.
        betas: of ``adamw``.
        eps: of ``adamw``, added outside the square root, to the bias-corrected moment.
        weight_decay: of ``adamw``, decoupled and multiplied with `lr`.
    """

    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclasses.dataclass(frozen=True)
class Step:
    """Loss, gradients, and running statistics and carried state after one batch, by name.

    `foreign`: whether random numbers other than dropout masks were drawn.
    """

    loss: Array
    gradients: Arrays
    statistics: Arrays
    foreign: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """State of an optimizer.

    Attributes:
        slots: ``mu``, ``nu``, ``trace`` -> parameter -> array.
        count: steps taken.
        own: the backend's own form of it; None where another backend's state is taken over.
    """

    slots: dict[str, Arrays]
    count: int
    own: Any = None
