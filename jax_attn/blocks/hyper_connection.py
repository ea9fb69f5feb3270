"""Manifold-constrained hyper-connections: several residual streams around a layer (arXiv 2409.19606, 2512.24880).

Twins: `jax_attn.blocks.hyper_connection`, `torch_attn.blocks.hyper_connection`. Letters: D width, n stream read, m
stream written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import einsum, rearrange
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.specs import HyperConnectionConfig

from .. import functional
from ..initial_weights import filled, linear
from ..random import Rngs


class HyperConnection(nnx.Module):
    """A residual connection of several streams: a layer reads their weighted sum, and they are mixed as it is added.

    The matrix that mixes them has rows and columns that sum to 1, so that no stream grows with the depth of a model.
    ``connection.write(streams, layer(x), shares, mixing)`` with ``x, shares, mixing = connection.read(streams)`` takes
    the place of ``x + layer(x)``.

    Args:
        config: width and number of the streams, and constants.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters; shares and the matrix are computed in float32 or wider.
        dtype: dtype of the input of the layer; None keeps that of the streams.

    Raises:
        TypeError: `config` is something else.
    """

    @HyperConnectionConfig.takes
    def __init__(
        self,
        config: HyperConnectionConfig,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.config = HyperConnectionConfig.check(config)
        width, outputs = config.streams * config.emb_dim, sum(config.sections)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.projection = linear(width, outputs, bias=False, **options)
        self.scale = filled(len(config.sections), 1.0, **options)
        self.bias = filled(outputs, 0.0, **options)
        self.dtype = dtype

    def read(
        self, streams: Float[Array, "... n D"]
    ) -> tuple[Float[Array, "... D"], Float[Array, "... m"] | None, Float[Array, "... n m"] | None]:
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
        raw = raw * jax.lax.rsqrt((wide * wide).mean((-2, -1))[..., None] + config.norm_eps)
        parts = []
        for part, bias, scale in zip(
            jnp.split(raw, config.bounds, -1),
            jnp.split(self.bias.astype(wide.dtype), config.bounds),
            self.scale.astype(wide.dtype),
            strict=True,
        ):
            parts.append(part * scale + bias)
        x = einsum(jax.nn.sigmoid(parts[0]) + config.eps, wide, "... n, ... n d -> ... d")
        x = x.astype(self.dtype or streams.dtype)
        if not config.writes:
            return x, None, None
        logits = rearrange(parts[2], "... (n m) -> ... n m", n=config.streams)
        # Sinkhorn and Knopp: rows and columns are divided by their sums in turn, until both are 1. Softmax is the
        # first step, of rows.
        mixing = jax.nn.softmax(logits, -1) + config.eps
        mixing = mixing / (mixing.sum(-2, keepdims=True) + config.eps)
        for _ in range(config.iterations - 1):
            mixing = mixing / (mixing.sum(-1, keepdims=True) + config.eps)
            mixing = mixing / (mixing.sum(-2, keepdims=True) + config.eps)
        # Shares of 0 to 2: where the projection gives 0 they are 1, as in a plain residual connection.
        return x, 2.0 * jax.nn.sigmoid(parts[1]), mixing

    def write(
        self,
        streams: Float[Array, "... n D"],
        output: Float[Array, "... D"],
        shares: Float[Array, "... m"],
        mixing: Float[Array, "... n m"],
    ) -> Float[Array, "... m D"]:
        """Return the streams behind the layer, ``(..., N, D)``: mixed, plus each one's share of the layer's output.

        Args:
            streams: ``(..., N, D)``, as `read` took them.
            output: of the layer, ``(..., D)``.
            shares: of `read`.
            mixing: of `read`; a sum over its rows gives a stream.
        """
        mixed = einsum(mixing.astype(streams.dtype), streams, "... n m, ... n d -> ... m d")
        return mixed + einsum(shares.astype(streams.dtype), output, "... m, ... d -> ... m d")
