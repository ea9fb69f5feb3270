"""Causal multi-head attention with split projections and an output projection (book section 3.6.2)."""

from __future__ import annotations

import dataclasses

from .base import Axis, Config, Parameter, Variant, linear


@dataclasses.dataclass(frozen=True)
class MultiHeadAttentionConfig(Config):
    """Widths (`d_out` is the total over heads), the longest sequence, dropout rate, heads, and q/k/v biases."""

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
        self._require_multiple("d_out", "num_heads")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_out // self.num_heads

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three projections, then the output projection, which always has a bias."""
        names, heads = ("W_query", "W_key", "W_value"), Axis("heads", self.num_heads)
        return (
            *(
                row
                for name in names
                for row in linear(name, self.d_in, self.d_out, bias=self.qkv_bias, axes=(heads, "embed"))
            ),
            *linear("out_proj", self.d_out, self.d_out, bias=True, axes=("embed", heads)),
        )


VARIANT = Variant("MultiHeadAttention", "multi_head_attention", MultiHeadAttentionConfig)
