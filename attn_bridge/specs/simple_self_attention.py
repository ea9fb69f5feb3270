"""Simple self-attention without trainable weights (book section 3.3)."""

from __future__ import annotations

import dataclasses

from .base import Config, Parameter, Variant


@dataclasses.dataclass(frozen=True)
class SimpleSelfAttentionConfig(Config):
    """The function has neither arguments nor parameters."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """No parameters."""
        return ()


VARIANT = Variant("simple_self_attention", "simple_self_attention", SimpleSelfAttentionConfig, is_function=True)
