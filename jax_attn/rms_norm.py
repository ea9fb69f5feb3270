"""Root mean square normalisation: every feature vector to mean square 1, then scaled (arXiv 1910.07467).

Twins: `jax_attn.rms_norm`, `torch_attn.rms_norm`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.specs import RMSNormConfig

from . import functional
from .initial_weights import filled
from .random import Rngs


class RMSNorm(nnx.Module):
    """Root mean square normalisation over the last axis: no mean is subtracted and nothing is added.

    Args:
        emb_dim: width of the features.
        eps: constant added to the mean square.
        unit_offset: whether features are multiplied by ``1 + scale`` (Gemma), which starts at 0, and not by ``scale``.
        affine: whether features are scaled.
        rngs: taken like in every module; a norm draws nothing.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.

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
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.config = RMSNormConfig(emb_dim, eps, unit_offset, affine)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        if affine:
            self.scale = filled(emb_dim, 0.0 if unit_offset else 1.0, **options)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalise ``x`` of shape ``(..., emb_dim)`` and scale it, in float32, in float64 for float64 input.

        Raises:
            ValueError: a last dimension other than `emb_dim`.
            TypeError: an input that is not floating point.
        """
        config = self.config
        x = functional.as_features(x, self.scale if config.affine else x, config.emb_dim)
        out_dtype = self.dtype or (jnp.promote_types(x.dtype, self.scale.dtype) if config.affine else x.dtype)
        wide = functional.widen(x)
        normalised = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + config.eps)
        if not config.affine:
            return normalised.astype(out_dtype)
        scale = self.scale.astype(wide.dtype)
        return (normalised * (1.0 + scale if config.unit_offset else scale)).astype(out_dtype)
