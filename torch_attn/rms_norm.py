"""Root mean square normalisation: every feature vector to mean square 1, then scaled (arXiv 1910.07467).

Twins: `jax_attn.rms_norm`, `torch_attn.rms_norm`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from attn_bridge.specs import RMSNormConfig

from . import functional
from .initial_weights import filled
from .layer import Layer
from .random import JaxRngs


class RMSNorm(Layer):
    """Root mean square normalisation over the last axis: no mean is subtracted and nothing is added.

    Args:
        emb_dim: width of the features.
        eps: constant added to the mean square.
        unit_offset: whether features are multiplied by ``1 + scale`` (Gemma), which starts at 0, and not by ``scale``.
        affine: whether features are scaled.
        rngs: taken like in every module; a norm draws nothing.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.

    Raises:
        ValueError: `emb_dim` below 1, `eps` not positive and finite, or `unit_offset` without a scale.
        TypeError: `unit_offset` or `affine` is not a bool.
    """

    @RMSNormConfig.spreads
    def __init__(
        self,
        emb_dim: int,
        eps: float = 1e-6,
        unit_offset: bool = False,
        affine: bool = True,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = RMSNormConfig(emb_dim, eps, unit_offset, affine)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        if affine:
            self.scale = filled(emb_dim, 0.0 if unit_offset else 1.0, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        if self.config.affine:
            self.scale.fill_(0.0 if self.config.unit_offset else 1.0)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Normalise ``x`` of shape ``(..., emb_dim)`` and scale it, in float32, in float64 for float64 input.

        Raises:
            ValueError: a last dimension other than `emb_dim`.
            TypeError: an input that is not floating point.
        """
        config = self.config
        x = functional.as_features(x, self.scale if config.affine else x, config.emb_dim)
        wide = functional.widen(x)
        normalised = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + config.eps)
        if not config.affine:
            return normalised.to(x.dtype)
        scale = self.scale.to(wide.dtype)
        return (normalised * (1.0 + scale if config.unit_offset else scale)).to(x.dtype)
