"""Manifold-constrained hyper-connections: several residual streams around a layer (arXiv 2409.19606, 2512.24880).

Twins: `jax_attn.blocks.hyper_connection`, `torch_attn.blocks.hyper_connection`. Letters: D width, n stream read, m
stream written.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from attn_bridge.specs import HyperConnectionConfig

from .. import functional
from ..initial_weights import filled, linear
from ..layer import Layer
from ..operations.autocast import without_autocast
from ..random import JaxRngs


class HyperConnection(Layer):
    """A residual connection of several streams: a layer reads their weighted sum, and they are mixed as it is added.

    The matrix that mixes them has rows and columns that sum to 1, so that no stream grows with the depth of a model.
    ``connection.write(streams, layer(x), shares, mixing)`` with ``x, shares, mixing = connection.read(streams)`` takes
    the place of ``x + layer(x)``.

    Args:
        config: width and number of the streams, and constants.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters; shares and the matrix are computed in float32 or wider.

    Raises:
        TypeError: `config` is something else.
    """

    @HyperConnectionConfig.takes
    def __init__(
        self,
        config: HyperConnectionConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = HyperConnectionConfig.check(config)
        width, outputs = config.streams * config.emb_dim, sum(config.sections)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        self.projection = linear(width, outputs, bias=False, **options)
        self.scale = filled(len(config.sections), 1.0, **options)
        self.bias = filled(outputs, 0.0, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        self.scale.fill_(1.0)
        self.bias.zero_()

    def read(
        self, streams: Float[Tensor, "... n D"]
    ) -> tuple[Float[Tensor, "... D"], Float[Tensor, "... m"] | None, Float[Tensor, "... n m"] | None]:
        """Return the input of the layer, the shares of its output, and the matrix that mixes the streams.

        Args:
            streams: ``(..., N, D)``.

        Returns:
            ``(..., D)``, ``(..., N)`` and ``(..., N, N)``; the last two are None without `config.writes`.

        Raises:
            ValueError: another number of streams, or another width.
            TypeError: streams that are not floating point.
        """
        config = self.config
        config.check_streams(functional.shape_of(streams), functional.dtype_name(streams, "streams"))
        wide = functional.widen(streams)
        # A norm without a scale only divides: behind the projection, it leaves that the streams as they are.
        raw = functional.widened(self.projection, rearrange(streams, "... n d -> ... (n d)"))
        raw = raw * torch.rsqrt((wide * wide).mean((-2, -1))[..., None] + config.norm_eps)
        parts = []
        for part, bias, scale in zip(
            torch.split(raw, config.sections, -1),
            torch.split(self.bias.to(wide.dtype), config.sections),
            self.scale.to(wide.dtype),
            strict=True,
        ):
            parts.append(part * scale + bias)
        with without_autocast(wide):
            x = einsum(torch.sigmoid(parts[0]) + config.eps, wide, "... n, ... n d -> ... d")
        x = x.to(streams.dtype)
        if not config.writes:
            return x, None, None
        logits = rearrange(parts[2], "... (n m) -> ... n m", n=config.streams)
        # Sinkhorn and Knopp: rows and columns are divided by their sums in turn, until both are 1. Softmax is the
        # first step, of rows.
        mixing = torch.softmax(logits, -1) + config.eps
        mixing = mixing / (mixing.sum(-2, keepdim=True) + config.eps)
        for _ in range(config.iterations - 1):
            mixing = mixing / (mixing.sum(-1, keepdim=True) + config.eps)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + config.eps)
        # Shares of 0 to 2: where the projection gives 0 they are 1, as in a plain residual connection.
        return x, 2.0 * torch.sigmoid(parts[1]), mixing

    def write(
        self,
        streams: Float[Tensor, "... n D"],
        output: Float[Tensor, "... D"],
        shares: Float[Tensor, "... m"],
        mixing: Float[Tensor, "... n m"],
    ) -> Float[Tensor, "... m D"]:
        """Return the streams behind the layer, ``(..., N, D)``: mixed, plus each one's share of the layer's output.

        Args:
            streams: ``(..., N, D)``, as `read` took them.
            output: of the layer, ``(..., D)``.
            shares: of `read`.
            mixing: of `read`; a sum over its rows gives a stream.
        """
        with without_autocast(streams):  # which would round the streams in every layer
            mixed = einsum(mixing.to(streams.dtype), streams, "... n m, ... n d -> ... m d")
            return mixed + einsum(shares.to(streams.dtype), output.to(streams.dtype), "... m, ... d -> ... m d")
