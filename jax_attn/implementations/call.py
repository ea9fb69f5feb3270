"""The checked arguments of `functional.dot_product_attention`, as every implementation takes them.

The twin is `torch_attn.implementations.call`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from attn_bridge.masks import Mask


@dataclasses.dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of attention; shapes, dtypes and devices are checked, ``scale`` is a number."""

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S K D"]
    value: Float[Array, "B S K Dv"]
    mask: Mask | None
    bias: Float[Array, "..."] | None
    scale: float
    softcap: float | None
    sinks: Float[Array, "H"] | None
    dropout: float
    rng: Any
    return_weights: bool

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """``(B, H, T, S)``."""
        batch, queries, heads, _ = self.query.shape
        return batch, heads, queries, self.key.shape[1]

    def allowed(self) -> Bool[Array, "..."] | None:
        """Return the mask as a bool array broadcastable to the scores; None where there is no mask."""
        if self.mask is None:
            return None
        _, _, queries, keys = self.scores_shape
        return self.mask.allowed(jnp.arange(queries)[:, None], jnp.arange(keys)[None, :])
