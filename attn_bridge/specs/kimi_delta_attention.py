"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): the gated delta rule with a decay per channel of the key."""

from __future__ import annotations

import dataclasses

from .base import DERIVED, Axis, Example, Parameter, Variant, linear, short_convolution, vector
from .delta_rule import DeltaRuleConfig
from .model import below


@dataclasses.dataclass(frozen=True)
class KimiDeltaAttentionConfig(DeltaRuleConfig):
    """Sizes of the heads, of the short convolution before them, of the gates, and of the norm behind them.

    Attributes:
        d_in: width of the input.
        num_heads: heads of query, key and value, each with a state.
        head_dim: width of a head of query and key; ``d_in // num_heads`` by default.
        value_head_dim: width of a head of value; `head_dim` by default.
        gate_rank: width between the two projections of the decay, and of the output gate; `value_head_dim` by default.
        d_out: width of the output; `d_in` by default.
        conv_size: tokens that the convolution sees, the token itself included.
        eps: constant added to the mean square in the norm of the context.
    """

    d_in: int
    num_heads: int
    head_dim: int = DERIVED
    value_head_dim: int = DERIVED
    gate_rank: int = DERIVED
    d_out: int = DERIVED
    conv_size: int = 4
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads", "conv_size")
        if self.head_dim is None:
            self._require_multiple("d_in", "num_heads")
        self._resolve("head_dim", self.d_in // self.num_heads)
        self._resolve("value_head_dim", self.head_dim)
        self._resolve("gate_rank", self.value_head_dim)
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("head_dim", "value_head_dim", "gate_rank", "d_out")
        self._require_positive_number("eps")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Projections, the convolution, both gates of low rank, the decay's own numbers, the norm, and the output."""
        rank, d_out = self.gate_rank, self.d_out
        by_head = Axis("heads", self.num_heads)
        return (
            *linear("W_query", self.d_in, self.key_width, bias=False, axes=(by_head, "embed")),
            *linear("W_key", self.d_in, self.key_width, bias=False, axes=(by_head, "embed")),
            *linear("W_value", self.d_in, self.value_width, bias=False, axes=(by_head, "embed")),
            *linear("W_beta", self.d_in, self.num_heads, bias=False, axes=(by_head, "embed")),
            *linear("W_decay_down", self.d_in, rank, bias=False, axes=("latent", "embed")),
            *linear("W_decay_up", rank, self.key_width, bias=False, axes=(by_head, "latent")),
            *linear("W_gate_down", self.d_in, rank, bias=False, axes=("latent", "embed")),
            *linear("W_gate_up", rank, self.value_width, bias=False, axes=(by_head, "latent")),
            *short_convolution(self.conv_width, self.conv_size),
            vector("dt_bias", self.key_width, by_head),
            vector("A_log", self.num_heads, by_head),
            *(dataclasses.replace(row, axes=("head_dim",)) for row in below("norm", self.norm.parameters)),
            *linear("out_proj", self.value_width, d_out, bias=False, axes=("embed", by_head)),
        )


EXAMPLES = (
    Example(
        "kimi-linear",
        KimiDeltaAttentionConfig(8, 2, 4, 3, 5, conv_size=4, eps=1e-3),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example("no-convolution", KimiDeltaAttentionConfig(6, 3, gate_rank=4, d_out=5, conv_size=1)),
    Example("two-chunks", KimiDeltaAttentionConfig(4, 2, conv_size=2), tokens=18, batch=None),
    Example("as-many-tokens-as-heads", KimiDeltaAttentionConfig(6, 3, conv_size=3), tokens=3),
    Example("one-token", KimiDeltaAttentionConfig(6, 3, 4), tokens=1, batch=2),
)

VARIANT = Variant(
    "KimiDeltaAttention",
    "kimi_delta_attention",
    KimiDeltaAttentionConfig,
    group="modern",
    returns_weights=False,
    examples=EXAMPLES,
)
