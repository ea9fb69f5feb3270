"""Root mean square normalisation of gated values, group by group: the norm behind Mamba-2's heads.

The twin is `jax_attn.recurrent.gated_norm`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs.mamba2 import GatedNormOrder

from .. import functional
from ..layer import Layer
from ..random import JaxRngs


class GatedNorm(Layer):
    """Multiply features by ``silu(gate)``, bring each group of them to mean square 1, and scale.

    Or gate them last, or without a norm.

    Args:
        width: width of the features.
        groups: parts of equal width that are normalised each alone.
        eps: constant added to the mean square.
        order: whether the gate comes first (``gate_first``), or the norm (``norm_first``); ``none`` omits the norm.
        rngs: taken like in every module; a norm draws nothing.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        width: int,
        groups: int = 1,
        eps: float = 1e-5,
        order: GatedNormOrder = "gate_first",
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.group_width = width // groups
        self.eps = eps
        self.order = order
        if order != "none":
            self.scale = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    @torch.no_grad()
    def _reset_own(self) -> None:
        if self.order != "none":
            self.scale.fill_(1.0)

    def forward(self, x: Float[Tensor, "... d"], gate: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Return the normalised features in the dtype of `x`; they are computed in float32, float64 for float64."""
        check_width("W_gate", gate.shape[-1], x.shape[-1])
        if self.order != "none":
            check_width("scale", self.scale.shape[0], x.shape[-1])
        dtype = functional.wide_dtype(x)
        wide, gate = x.to(dtype), nn.functional.silu(gate.to(dtype))
        if self.order == "norm_first":
            return (self._norm(wide) * gate).to(x.dtype)
        gated = wide * gate
        return (gated if self.order == "none" else self._norm(gated)).to(x.dtype)

    def _norm(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Return each group of features with mean square 1, scaled."""
        parts = x.reshape(*x.shape[:-1], x.shape[-1] // self.group_width, self.group_width)
        normalised = (parts * torch.rsqrt((parts * parts).mean(-1, keepdim=True) + self.eps)).reshape(x.shape)
        return normalised * self.scale.to(x.dtype)
