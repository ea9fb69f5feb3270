"""Gated DeltaNet (Yang et al., arXiv 2412.06464) as Qwen3-Next runs it: a state that forgets and is corrected."""

from __future__ import annotations

import dataclasses

from ..weights import Rule
from .base import DERIVED, Axis, Config, Example, Parameter, Variant, linear, vector
from .model import below
from .rms_norm import RMSNormConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(Config):
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
    """

    d_in: int
    num_heads: int
    num_value_heads: int = DERIVED
    head_dim: int = DERIVED
    value_head_dim: int = DERIVED
    d_out: int = DERIVED
    conv_size: int = 4
    eps: float = 1e-6

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

    @property
    def key_width(self) -> int:
        """Width of query, and of key, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of value, and of the gate, over all heads."""
        return self.num_value_heads * self.value_head_dim

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
        return self.num_value_heads, self.head_dim, self.value_head_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Inputs of the convolution that a cache keeps, and their channels."""
        return self.conv_size - 1, self.conv_width

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Six projections, the convolution, the vectors of the decay, the norm, and the output projection."""
        heads, d_out = self.num_value_heads, self.d_out
        by_head = Axis("heads", self.num_heads)
        rule = Rule("conv1d.weight", "conv1d.kernel", "c i k -> k i c")
        return (
            *linear("W_query", self.d_in, self.key_width, bias=False, axes=(by_head, "embed")),
            *linear("W_key", self.d_in, self.key_width, bias=False, axes=(by_head, "embed")),
            *linear("W_value", self.d_in, self.value_width, bias=False, axes=(by_head, "embed")),
            *linear("W_gate", self.d_in, self.value_width, bias=False, axes=(by_head, "embed")),
            *linear("W_beta", self.d_in, heads, bias=False, axes=(by_head, "embed")),
            *linear("W_alpha", self.d_in, heads, bias=False, axes=(by_head, "embed")),
            Parameter(rule, (self.conv_width, 1, self.conv_size), ("channels", "one", "taps")),
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
)

VARIANT = Variant(
    "GatedDeltaNet",
    "gated_delta_net",
    GatedDeltaNetConfig,
    group="modern",
    returns_weights=False,
    examples=EXAMPLES,
)
