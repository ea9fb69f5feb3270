"""The checked arguments of `functional.dot_product_attention`, as every implementation takes them.

The twin is `jax_attn.implementations.call`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_bridge.masks import Mask

from ..random import RandomSource

if TYPE_CHECKING:
    from .reference import Drawn


@dataclasses.dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of attention; shapes, dtypes and devices are checked, ``scale`` is a number."""

    query: Float[Tensor, "B T H D"]
    key: Float[Tensor, "B S K D"]
    value: Float[Tensor, "B S K Dv"]
    mask: Mask | None
    bias: Float[Tensor, "..."] | None
    scale: float
    softcap: float | None
    sinks: Float[Tensor, "H"] | None
    dropout: float
    rng: RandomSource | Drawn
    return_weights: bool

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """``(B, H, T, S)``."""
        batch, queries, heads, _ = self.query.shape
        return batch, heads, queries, self.key.shape[1]

    def allowed(self) -> Bool[Tensor, "..."] | None:
        """Return the mask as a bool array broadcastable to the scores; None where there is no mask."""
        if self.mask is None:
            return None
        _, _, queries, keys = self.scores_shape
        device = self.query.device
        return self.mask.allowed(
            torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)[None, :]
        )
