"""Gated DeltaNet (Yang et al., arXiv 2412.06464) as Qwen3-Next runs it: a state that forgets and is corrected."""

from __future__ import annotations

import dataclasses

from .base import DERIVED, LATER, Axis, Example, Parameter, Variant, linear, short_convolution, vector
from .delta_rule import DeltaRuleConfig
from .model import below


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(DeltaRuleConfig):
    """Sizes of the heads, of the short convolution before them, and the norm behind them.

    Attributes:
        d_in: width of the input.
        num_heads: heads of query and key.
        num_value_heads: heads of value, each with a state, a multiple of `num_heads`; `num_heads` by default.
        head_dim: width of a head of query and key; ``d_in // num_heads`` by default.
        value_head_dim: width of a head of value; `head_dim` by default.
        d_out: width of the output; `d_in` by default.
        conv_size: tokens that the convolution sees, the token itself included.
        eps: constant added to the mean square in the norm of the context.
        negative: whether beta is from 0 to 2, so that eigenvalues of a state's transition may be negative (OLMo hybrid,
            arXiv 2411.12537); from 0 to 1 otherwise.
    """

    d_in: int
    num_heads: int
    num_value_heads: int = DERIVED
    head_dim: int = DERIVED
    value_head_dim: int = DERIVED
    d_out: int = DERIVED
    conv_size: int = 4
    eps: float = 1e-6
    negative: bool = dataclasses.field(default=False, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads", "conv_size")
        if self.head_dim is None:
            self._require_multiple("d_in", "num_heads")
        self._resolve("num_value_heads", self.num_heads)
        self._resolve("head_dim", self.d_in // self.num_heads)
        self._resolve("value_head_dim", self.head_dim)
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("num_value_heads", "head_dim", "value_head_dim", "d_out")
        self._require_multiple("num_value_heads", "num_heads")
        self._require_positive_number("eps")
        self._require_bools("negative")

    @property
    def states(self) -> int:
        """Heads of value, each with a state."""
        return self.num_value_heads

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Six projections, the convolution, the vectors of the decay, the norm, and the output projection."""
        heads, d_out = self.num_value_heads, self.d_out
        by_head = Axis("heads", self.num_heads)
        return (
            *linear("W_query", self.d_in, self.key_width, bias=False, axes=(by_head, "embed")),
            *linear("W_key", self.d_in, self.key_width, bias=False, axes=(by_head, "embed")),
            *linear("W_value", self.d_in, self.value_width, bias=False, axes=(by_head, "embed")),
            *linear("W_gate", self.d_in, self.value_width, bias=False, axes=(by_head, "embed")),
            *linear("W_beta", self.d_in, heads, bias=False, axes=(by_head, "embed")),
            *linear("W_alpha", self.d_in, heads, bias=False, axes=(by_head, "embed")),
            *short_convolution(self.conv_width, self.conv_size),
            vector("dt_bias", heads, by_head),
            vector("A_log", heads, by_head),
            *(dataclasses.replace(row, axes=("head_dim",)) for row in below("norm", self.norm.parameters)),
            *linear("out_proj", self.value_width, d_out, bias=False, axes=("embed", by_head)),
        )


EXAMPLES = (
    Example(
        "qwen3-next",
        GatedDeltaNetConfig(8, 2, 4, 3, 5, conv_size=4),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example("one-value-head", GatedDeltaNetConfig(6, 1, d_out=4, conv_size=1, eps=1e-3)),
    Example("two-chunks", GatedDeltaNetConfig(4, 2, conv_size=2), tokens=66, batch=None),
    Example("as-many-tokens-as-heads", GatedDeltaNetConfig(6, 3, conv_size=3), tokens=3),
    Example("one-token", GatedDeltaNetConfig(6, 3), tokens=1, batch=2),
    Example("olmo-hybrid", GatedDeltaNetConfig(6, 2, negative=True), tokens=66, mask="padding"),
)

VARIANT = Variant(
    "GatedDeltaNet", "gated_delta_net", GatedDeltaNetConfig, group="modern", returns_weights=False, examples=EXAMPLES
)
