"""What the judge of training and the trainers of both backends hand each other: masks, steps, optimizer states."""

from __future__ import annotations

import collections
import dataclasses
import zlib
from typing import Any

import numpy as np

from .. import rng
from .subjects import Array, Arrays


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
    """Loss, gradients and changed running statistics of one batch, by name."""

    loss: Array
    gradients: Arrays
    statistics: Arrays


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


class Masks:
    """Dropout masks of one training step, for either side: masks of one shape are drawn in the order of the calls.

    JAX's threefry draws them: the key of the seed, folded with the step, the shape, and how many masks of the shape
    were drawn before.

    Args:
        seed: of the whole training.
        step: number of the step.
    """

    def __init__(self, seed: int, step: int):
        self._key = rng.fold_in(rng.key(seed), step)
        self.rates: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)
        self.foreign = False

    def draw(self, shape: tuple[int, ...], keep: float) -> np.ndarray[Any, Any]:
        """Return a bool mask that is True with probability `keep`."""
        number = len(self.rates[shape])
        self.rates[shape].append(float(np.float32(keep)))
        key = rng.fold_in(rng.fold_in(self._key, zlib.crc32(repr(shape).encode())), number)
        return rng.bernoulli(key, float(keep), shape)
