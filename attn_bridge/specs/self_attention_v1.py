"""Self-attention with bare weight matrices (book section 3.4.2)."""

from __future__ import annotations

import dataclasses

from .base import Config, Parameter, Variant, matrix


@dataclasses.dataclass(frozen=True)
class SelfAttentionV1Config(Config):
    """Width of the input and of query, key and value."""

    d_in: int
    d_out: int

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "d_out")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three matrices ``[d_in, d_out]``."""
        return tuple(
            matrix(name, self.d_in, self.d_out, ("embed", "head_dim")) for name in ("W_query", "W_key", "W_value")
        )


VARIANT = Variant("SelfAttention_v1", "self_attention_v1", SelfAttentionV1Config)
