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

from .. import functional
from ..random import Rngs


class GatedNorm(nnx.Module):
    """Multiply features by ``silu(gate)``, then bring each group of them to mean square 1, then scale.

    Args:
        width: width of the features.
        groups: parts of equal width that are normalised each alone.
        eps: constant added to the mean square.
        rngs: taken like in every module; a norm draws nothing.
        param_dtype: dtype of the parameters.
        dtype: taken like in every module; the norm computes in float32, in float64 for float64 input.
    """

    def __init__(
        self,
        width: int,
        groups: int = 1,
        eps: float = 1e-5,
        *,
        rngs: Rngs | None = None,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.group_width = width // groups
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, param_dtype))

    def __call__(self, x: Float[Array, "... d"], gate: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Return the normalised features in the dtype of `x`; they are computed in float32, float64 for float64."""
        dtype = functional.wide_dtype(x)
        gated = x.astype(dtype) * jax.nn.silu(gate.astype(dtype))
        parts = gated.reshape(*gated.shape[:-1], gated.shape[-1] // self.group_width, self.group_width)
        normalised = (parts * jax.lax.rsqrt((parts * parts).mean(-1, keepdims=True) + self.eps)).reshape(gated.shape)
        return (normalised * self.scale.astype(dtype)).astype(x.dtype)
