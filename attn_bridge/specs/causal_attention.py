"""Causal self-attention with dropout on the weights (book section 3.5)."""

from __future__ import annotations

import dataclasses

from .base import Config, Parameter, Variant, linear


@dataclasses.dataclass(frozen=True)
class CausalAttentionConfig(Config):
    """Widths, the longest sequence, the dropout rate of the attention weights, and whether q, k, v have biases."""

    d_in: int
    d_out: int
    context_length: int
    dropout: float = 0.0
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "d_out", "context_length")
        self._require_rates("dropout")
        self._require_bools("qkv_bias")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three linear layers; the mask is computed, not stored."""
        names = ("W_query", "W_key", "W_value")
        return tuple(
            row
            for name in names
            for row in linear(name, self.d_in, self.d_out, bias=self.qkv_bias, axes=("head_dim", "embed"))
        )


VARIANT = Variant("CausalAttention", "causal_attention", CausalAttentionConfig)
