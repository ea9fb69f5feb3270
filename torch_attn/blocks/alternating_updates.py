"""Alternating updates (AltUp, arXiv 2301.13310): several streams per token, of which each block updates one.

Twins: `jax_attn.blocks.alternating_updates`, `torch_attn.blocks.alternating_updates`. Letters: b batch, t position, n
and m streams, d width.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import AlternatingUpdatesConfig

from .. import functional
from ..initial_weights import filled, linear
from ..layer import Layer
from ..random import JaxRngs
from ..rms_norm import RMSNorm

LEAST = 1e-5
"""Least mean square of a stream whose magnitude is changed, as in Gemma 3n."""


class AlternatingUpdates(Layer):
    """Predicts the streams in front of a block's sublayers, and corrects them behind.

    Args:
        config: number and width of the streams, and the one that the sublayers read.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    def __init__(
        self,
        config: AlternatingUpdatesConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = config
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        streams = config.num_streams
        self.corrected_scale = filled(config.d_in, 0.0, **options)
        self.correction = linear(streams, streams, bias=False, **options)
        self.prediction = linear(streams, streams * streams, bias=False, **options)
        self.stream_router = linear(config.d_in, streams, bias=False, **options)
        self.stream_norm = RMSNorm(config.d_in, config.eps, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        self.corrected_scale.zero_()

    def predict(self, streams: Float[Tensor, "b t n d"]) -> Float[Tensor, "b t n d"]:
        """Return every stream plus a sum of all of them, whose coefficients follow from the active one."""
        routed = self._route(streams[:, :, self.config.active])
        coefficients, number = self.prediction(routed), self.config.num_streams
        check_width("prediction", coefficients.shape[-1], number * number)
        coefficients = rearrange(coefficients, "b t (m n) -> b t m n", n=number)
        return streams + einsum(coefficients, streams, "b t m n, b t n d -> b t m d")

    def correct(self, predicted: Float[Tensor, "b t n d"], updated: Float[Tensor, "b t d"]) -> Float[Tensor, "b t n d"]:
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

    def scaled(self, corrected: Float[Tensor, "b t n d"]) -> Float[Tensor, "b t d"]:
        """Return the active stream, multiplied by the learned vector if the config has it so."""
        active = corrected[:, :, self.config.active]
        check_width("corrected_scale", self.corrected_scale.shape[0], active.shape[-1])
        return active * self.corrected_scale if self.config.scale_corrected else active

    def _route(self, active: Float[Tensor, "b t d"]) -> Float[Tensor, "b t n"]:
        """Return a number between -1 and 1 for each stream."""
        routed = self.stream_router(self.stream_norm(active) * self.config.d_in**-1.0)
        return torch.tanh(functional.widen(routed)).to(routed.dtype)


def spread(x: Float[Tensor, "b t d"], projections: nn.ModuleList) -> Float[Tensor, "b t n d"]:
    """Return the streams of an embedding: itself, and its projections with its magnitude."""
    magnitude = functional.root((x * x).mean(-1, keepdim=True))
    return torch.stack([x, *(_with_magnitude(project(x), magnitude) for project in projections)], 2)


def gather(streams: Float[Tensor, "b t n d"], projections: nn.ModuleList) -> Float[Tensor, "b t d"]:
    """Return the mean of the first stream and the projections of the others, with its magnitude."""
    first = streams[:, :, 0]
    magnitude = functional.root((first * first).mean(-1, keepdim=True))
    others = (
        _with_magnitude(project(streams[:, :, number]), magnitude) for number, project in enumerate(projections, 1)
    )
    return torch.stack([first, *others], 2).mean(2)


def _with_magnitude(x: Float[Tensor, "b t d"], magnitude: Float[Tensor, "b t 1"]) -> Float[Tensor, "b t d"]:
    return x * magnitude / torch.sqrt(torch.clamp((x * x).mean(-1, keepdim=True), min=LEAST))
