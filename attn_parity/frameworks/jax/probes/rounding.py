"""Run any JAX program with other roundings: move every result of an operation by up to one unit in the last place.

This resamples a module's rounding error (Monte Carlo arithmetic: Parker, 1997).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

_EXACT = """
abs argmax argmin broadcast_in_dim ceil clamp concatenate convert_element_type copy dynamic_slice
dynamic_update_slice expand_dims floor gather iota max min neg pad reduce_max reduce_min reshape rev round
scatter select_and_gather_add select_n sign slice sort split squeeze stop_gradient top_k transpose
"""

EXACT = frozenset(_EXACT.split())
"""Operations that add no rounding: they move, choose or fill."""

MANY = 1 << 20
"""Numbers of an array above which they are drawn in float32, which takes a third of the time."""


class JaxprJitter:
    """Moves the results of operations.

    Args:
        seed: of the random numbers.
        double: whether float64 moves by its own unit; otherwise by that of float32, because the other side of a module
        that works in a lower precision cannot be held to more.
    """

    def __init__(self, seed: int, *, double: bool = True):
        self._random = np.random.default_rng(seed)
        self._double = double

    def moved(self, name: str, results: Sequence[ArrayLike]) -> list[ArrayLike]:
        """Return the results of the operation `name`, moved unless it rounds nothing."""
        return list(results) if name in EXACT else [self._moved(one) for one in results]

    def _moved(self, value: ArrayLike) -> ArrayLike:
        if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        own: type[np.floating] = np.float32 if value.size > MANY and value.dtype != np.float64 else np.float64
        kind = value.dtype if self._double or value.dtype != np.float64 else np.float32
        wide, eps = np.asarray(value).astype(own), own(jnp.finfo(kind).eps)
        noise = own(2.0) * self._random.random(value.shape, own) - own(1.0)
        with np.errstate(invalid="ignore"):
            moved = np.where(np.isinf(wide), wide, wide + wide * noise * eps)  # a hidden score stays hidden
        return jax.device_put(moved.astype(value.dtype), value.device)
