"""Alternating updates (AltUp, arXiv 2301.13310): several streams per token, of which each block updates one.

Twins: `jax_attn.blocks.alternating_updates`, `torch_attn.blocks.alternating_updates`. Letters: b batch, t position, n
and m streams, d width.
"""

from __future__ import annotations

import jax.numpy as jnp
from einops import einsum, rearrange
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import AlternatingUpdatesConfig

from .. import functional
from ..initial_weights import filled, linear
from ..random import Rngs
from ..rms_norm import RMSNorm

LEAST = 1e-5
"""Least mean square of a stream whose magnitude is changed, as in Gemma 3n."""


class AlternatingUpdates(nnx.Module):
    """Predicts the streams in front of a block's sublayers, and corrects them behind.

    Args:
        config: number and width of the streams, and the one that the sublayers read.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
    """

    def __init__(
        self,
        config: AlternatingUpdatesConfig,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.config = config
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        streams = config.num_streams
        self.corrected_scale = filled(config.d_in, 0.0, **options)
        self.correction = linear(streams, streams, bias=False, **options)
        self.prediction = linear(streams, streams * streams, bias=False, **options)
        self.stream_router = linear(config.d_in, streams, bias=False, **options)
        self.stream_norm = RMSNorm(config.d_in, config.eps, **options)

    def predict(self, streams: Float[Array, "b t n d"]) -> Float[Array, "b t n d"]:
        """Return every stream plus a sum of all of them, whose coefficients follow from the active one."""
        routed = self._route(streams[:, :, self.config.active])
        coefficients, number = self.prediction(routed), self.config.num_streams
        check_width("prediction", coefficients.shape[-1], number * number)
        coefficients = rearrange(coefficients, "b t (m n) -> b t m n", n=number)
        return streams + einsum(coefficients, streams, "b t m n, b t n d -> b t m d")

    def correct(self, predicted: Float[Array, "b t n d"], updated: Float[Array, "b t d"]) -> Float[Array, "b t n d"]:
        """Return every predicted stream plus its share of the active one's gain in the sublayers.

        Args:
            predicted: of `predict`.
            updated: the active stream behind the sublayers.
        """
        gain = updated - predicted[:, :, self.config.active]
        # Around 1: where the correction gives 0, each stream takes the gain that the active one has.
        shares = self.correction(self._route(updated)) + 1.0
        check_width("correction", shares.shape[-1], self.config.num_streams)
        return predicted + shares[..., None] * gain[:, :, None]

    def scaled(self, corrected: Float[Array, "b t n d"]) -> Float[Array, "b t d"]:
        """Return the active stream, multiplied by the learned vector if the config has it so."""
        active = corrected[:, :, self.config.active]
        check_width("corrected_scale", self.corrected_scale.shape[0], active.shape[-1])
        return active * self.corrected_scale.astype(active.dtype) if self.config.scale_corrected else active

    def _route(self, active: Float[Array, "b t d"]) -> Float[Array, "b t n"]:
        """Return a number between -1 and 1 for each stream."""
        routed = self.stream_router(self.stream_norm(active) * self.config.d_in**-1.0)
        return jnp.tanh(functional.widen(routed)).astype(routed.dtype)


def spread(x: Float[Array, "b t d"], projections: nnx.List) -> Float[Array, "b t n d"]:
    """Return the streams of an embedding: itself, and its projections with its magnitude."""
    magnitude = functional.root((x * x).mean(-1, keepdims=True))
    return jnp.stack([x, *(_with_magnitude(project(x), magnitude) for project in projections)], 2)


def gather(streams: Float[Array, "b t n d"], projections: nnx.List) -> Float[Array, "b t d"]:
    """Return the mean of the first stream and the projections of the others, with its magnitude."""
    first = streams[:, :, 0]
    magnitude = functional.root((first * first).mean(-1, keepdims=True))
    others = (
        _with_magnitude(project(streams[:, :, number]), magnitude) for number, project in enumerate(projections, 1)
    )
    return jnp.stack([first, *others], 2).mean(2)


def _with_magnitude(x: Float[Array, "b t d"], magnitude: Float[Array, "b t 1"]) -> Float[Array, "b t d"]:
    return x * magnitude / jnp.sqrt(jnp.maximum((x * x).mean(-1, keepdims=True), LEAST))
