"""Root mean square normalisation of gated values, group by group: the norm behind Mamba-2's heads.

The twin is `torch_attn.recurrent.gated_norm`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs.mamba2 import GatedNormOrder

from .. import functional
from ..random import Rngs


class GatedNorm(nnx.Module):
    """Multiply features by ``silu(gate)``, bring each group of them to mean square 1, and scale.

    Or gate them last, or without a norm.

    Args:
        width: width of the features.
        groups: parts of equal width that are normalised each alone.
        eps: constant added to the mean square.
        order: whether the gate comes first (``gate_first``), or the norm (``norm_first``); ``none`` omits the norm.
        rngs: taken like in every module; a norm draws nothing.
        param_dtype: dtype of the parameters.
        dtype: taken like in every module; the norm computes in float32, in float64 for float64 input.
    """

    def __init__(
        self,
        width: int,
        groups: int = 1,
        eps: float = 1e-5,
        order: GatedNormOrder = "gate_first",
        *,
        rngs: Rngs | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.group_width = width // groups
        self.eps = eps
        self.order = order
        if order != "none":
            self.scale = nnx.Param(jnp.ones(width, param_dtype))

    def __call__(self, x: Float[Array, "... d"], gate: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Return the normalised features in the dtype of `x`; they are computed in float32, float64 for float64."""
        check_width("W_gate", gate.shape[-1], x.shape[-1])
        if self.order != "none":
            check_width("scale", self.scale.shape[0], x.shape[-1])
        dtype = functional.wide_dtype(x)
        wide, gate = x.astype(dtype), jax.nn.silu(gate.astype(dtype))
        if self.order == "norm_first":
            return (self._norm(wide) * gate).astype(x.dtype)
        gated = wide * gate
        return (gated if self.order == "none" else self._norm(gated)).astype(x.dtype)

    def _norm(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Return each group of features with mean square 1, scaled."""
        parts = x.reshape(*x.shape[:-1], x.shape[-1] // self.group_width, self.group_width)
        normalised = (parts * jax.lax.rsqrt((parts * parts).mean(-1, keepdims=True) + self.eps)).reshape(x.shape)
        return normalised * self.scale.astype(x.dtype)
