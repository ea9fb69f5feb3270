"""Self-attention with linear layers (book section 3.4.2)."""

from __future__ import annotations

import dataclasses

from .base import Config, Parameter, Variant, linear


@dataclasses.dataclass(frozen=True)
class SelfAttentionV2Config(Config):
    """Width of the input and of query, key and value, and whether those have biases."""

    d_in: int
    d_out: int
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "d_out")
        self._require_bools("qkv_bias")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three linear layers."""
        names = ("W_query", "W_key", "W_value")
        return tuple(
            row
            for name in names
            for row in linear(name, self.d_in, self.d_out, bias=self.qkv_bias, axes=("head_dim", "embed"))
        )


VARIANT = Variant("SelfAttention_v2", "self_attention_v2", SelfAttentionV2Config, aliases=("SelfAttention",))
