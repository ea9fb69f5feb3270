"""Feed-forward layers of decoders: two matrices with an activation between them, or three, of which one gates.

Twins: `jax_attn.blocks.feed_forward`, `torch_attn.blocks.feed_forward`.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import FeedForwardConfig

from .. import functional
from ..dropout import Dropout
from ..initial_weights import ParameterOptions, linear
from ..layer import Layer
from ..rms_norm import RMSNorm
from .activation import XIELU, Activation


class FeedForward(Layer):
    """Two linear layers with an activation between them: ``layers[2](activation(layers[0](x)))``.

    Args:
        config: widths, activation, biases, dropout; without a gate.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: FeedForwardConfig, **options: Unpack[ParameterOptions]):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            [
                linear(config.d_in, config.hidden_dim, config.bias, **options),
                XIELU(**options) if config.activation == "xielu" else Activation(config.activation),
                linear(config.hidden_dim, config.d_in, config.bias, **options),
            ]
        )
        if config.dropout:
            self.drop_hidden = Dropout(config.dropout, rngs=options.get("rngs"))

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Apply the layers to ``x`` of shape ``(..., d_in)``, each token on its own."""
        hidden = self.layers[1](self.layers[0](x))
        if self.config.dropout:
            hidden = self.drop_hidden(hidden)
        output = self.layers[2](hidden)
        check_width("layers.2", output.shape[-1], self.config.d_in)
        return output


class GatedFeedForward(Layer):
    """Three linear layers, of which one gates another: ``fc3(activation(fc1(x)) * fc2(x))`` (arXiv 2002.05202).

    Args:
        config: widths, activation, biases, and how gate and values are clipped, scaled or normed; with a gate.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: FeedForwardConfig, **options: Unpack[ParameterOptions]):
        super().__init__()
        self.config = config
        self.fc1 = linear(config.d_in, config.hidden_dim, config.bias, **options)
        self.fc2 = linear(config.d_in, config.hidden_dim, config.bias, **options)
        self.fc3 = linear(config.hidden_dim, config.d_in, config.bias, **options)
        if config.hidden_norm is not None:
            self.hidden_norm = RMSNorm(config.hidden_dim, config.hidden_norm, **options)
        self.activation = Activation(config.activation)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Apply the layers to ``x`` of shape ``(..., d_in)``, each token on its own."""
        gate, value = self.fc1(x), self.fc2(x)
        check_width("fc1", gate.shape[-1], value.shape[-1])
        if self.config.clamp is None:
            gate_scale, output_scale = self.config.scales
            gate = gate if gate_scale == 1.0 else gate * gate_scale
            if self.config.sparsity:
                gate = self._sparse(gate)
            hidden = self.activation(gate) * value
            hidden = hidden if self.config.hidden_norm is None else self.hidden_norm(hidden)
            return self._projected(hidden, output_scale)
        limit, alpha = self.config.clamp.limit, self.config.clamp.alpha
        gate = torch.clamp(gate, max=limit)
        value = torch.clamp(value, -limit, limit)
        return self._projected(gate * torch.sigmoid(gate * alpha) * (value + 1.0))

    def _projected(self, hidden: Float[Tensor, "... h"], scale: float = 1.0) -> Float[Tensor, "... d"]:
        """Return the output of the last layer, scaled."""
        output = self.fc3(hidden)
        check_width("fc3", output.shape[-1], self.config.d_in)
        return output if scale == 1.0 else output * scale

    def _sparse(self, gate: Float[Tensor, "... h"]) -> Float[Tensor, "... h"]:
        """Return the gate less a bound, which follows from its mean and deviation, and 0 below it."""
        mean = gate.mean(-1, keepdim=True)
        variance = ((gate - mean) * (gate - mean)).mean(-1, keepdim=True)
        deviation = functional.root(variance)
        return nn.functional.relu(gate - (mean + deviation * self.config.bound))


def make_feed_forward(config: FeedForwardConfig, **options: Any) -> FeedForward | GatedFeedForward:
    """Return the layers of a config, with a gate or without; `options` are those of both classes."""
    return GatedFeedForward(config, **options) if config.gated else FeedForward(config, **options)
