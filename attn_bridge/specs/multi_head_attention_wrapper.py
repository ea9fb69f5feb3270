"""Several causal heads side by side, concatenated (book section 3.6.1)."""

from __future__ import annotations

import dataclasses

from .base import Config, Parameter, Variant, linear
from .causal_attention import CausalAttentionConfig


@dataclasses.dataclass(frozen=True)
class MultiHeadAttentionWrapperConfig(Config):
    """Like `CausalAttentionConfig`, with `d_out` per head and a number of heads."""

    d_in: int
    d_out: int
    context_length: int
    dropout: float = 0.0
    num_heads: int = 1
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "d_out", "context_length", "num_heads")
        self._require_rates("dropout")
        self._require_bools("qkv_bias")

    @property
    def head(self) -> CausalAttentionConfig:
        """Config of one head."""
        return CausalAttentionConfig(self.d_in, self.d_out, self.context_length, self.dropout, self.qkv_bias)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The linear layers of every head, head by head."""
        return tuple(
            row
            for head in range(self.num_heads)
            for name in ("W_query", "W_key", "W_value")
            for row in linear(
                f"heads.{head}.{name}", self.d_in, self.d_out, bias=self.qkv_bias, axes=("head_dim", "embed")
            )
        )


VARIANT = Variant("MultiHeadAttentionWrapper", "multi_head_attention_wrapper", MultiHeadAttentionWrapperConfig)
