"""Widths and states that the configs of gated delta rules share: Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

from .base import Config
from .rms_norm import RMSNormConfig


class DeltaRuleConfig(Config):
    """Base of configs with a short convolution before the heads and a norm behind them; the fields are a subclass's."""

    num_heads: int
    head_dim: int
    value_head_dim: int
    conv_size: int
    eps: float

    @property
    def states(self) -> int:
        """Heads of value, each with a state."""
        return self.num_heads

    @property
    def key_width(self) -> int:
        """Width of query, and of key, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of value, and of the output gate, over all heads."""
        return self.states * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: query, key and value, one after the other."""
        return 2 * self.key_width + self.value_width

    @property
    def norm(self) -> RMSNormConfig:
        """Config of the norm of the context, per head."""
        return RMSNormConfig(self.value_head_dim, self.eps)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a sequence: heads, channels of a key, channels of a value."""
        return self.states, self.head_dim, self.value_head_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Inputs of the convolution that a cache keeps, and their channels."""
        return self.conv_size - 1, self.conv_width
