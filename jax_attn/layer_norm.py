"""Layer normalisation: every feature vector to mean 0 and variance 1, then scaled and shifted (arXiv 1607.06450).

Twins: `jax_attn.layer_norm`, `torch_attn.layer_norm`. The book builds it in section 4.2, with the biased variance.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import LayerNormConfig

from . import functional
from .initial_weights import filled
from .random import Rngs


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, with a biased, two-pass variance.

    Args:
        emb_dim: width of the features.
        eps: constant added to the variance.
        affine: whether features are scaled and shifted at the end; OLMo's are not.
        bias: whether they are shifted; nanoGPT's are scaled alone where it has no biases.
        unit_offset: whether features are multiplied by ``1 + scale`` (Nemotron), which starts at 0, not by ``scale``.
        rngs: taken like in every module; a norm draws nothing.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.

    Raises:
        ValueError: `emb_dim` below 1, `eps` not positive and finite, or `unit_offset` without a scale.
        TypeError: `affine`, `bias` or `unit_offset` is not a bool.
    """

    @LayerNormConfig.spreads
    def __init__(
        self,
        emb_dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        unit_offset: bool = False,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.config = LayerNormConfig(emb_dim, eps, affine, bias, unit_offset)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        if affine:
            self.scale = filled(emb_dim, 0.0 if unit_offset else 1.0, **options)
        if affine and bias:
            self.shift = filled(emb_dim, 0.0, **options)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalise ``x`` of shape ``(..., emb_dim)``; mean and variance are float32, float64 for float64 input.

        Raises:
            ValueError: a last dimension other than `emb_dim`.
            TypeError: an input that is not floating point.
        """
        config = self.config
        x = functional.as_features(x, self.scale if config.affine else x, config.emb_dim)
        out_dtype = self.dtype or (jnp.promote_types(x.dtype, self.scale.dtype) if config.affine else x.dtype)
        wide = functional.widen(x)
        centred = wide - wide.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        normalised = centred / jnp.sqrt(variance + config.eps)
        if not config.affine:
            return normalised.astype(out_dtype)
        if config.bias:
            check_width("shift", self.shift.shape[0], config.emb_dim)
        scaled = (1.0 + self.scale if config.unit_offset else self.scale) * normalised
        return (scaled + self.shift if config.bias else scaled).astype(out_dtype)
