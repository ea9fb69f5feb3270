"""Linear attention (Katharopoulos et al., arXiv 2006.16236): weights are products of positive features, no softmax."""

from __future__ import annotations

import dataclasses

from .base import DERIVED, Axis, Config, Example, Parameter, Variant, linear


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(Config):
    """Sizes and biases.

    Attributes:
        d_in: width of the input.
        num_heads: number of heads.
        head_dim: width of a head of query and key; ``d_in // num_heads`` by default.
        value_head_dim: width of a head of value; `head_dim` by default.
        d_out: width of the output; `d_in` by default.
        qkv_bias: whether query, key and value have biases.
        out_bias: whether the output projection has one.
    """

    d_in: int
    num_heads: int
    head_dim: int = DERIVED
    value_head_dim: int = DERIVED
    d_out: int = DERIVED
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads")
        if self.head_dim is None:
            self._require_multiple("d_in", "num_heads")
        self._resolve("head_dim", self.d_in // self.num_heads)
        self._resolve("value_head_dim", self.head_dim)
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("head_dim", "value_head_dim", "d_out")
        self._require_bools("qkv_bias", "out_bias")

    @property
    def key_width(self) -> int:
        """Width of query, and of key, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of value over all heads."""
        return self.num_heads * self.value_head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a sequence; one further channel of the values, all ones, counts the weights."""
        return self.num_heads, self.head_dim, self.value_head_dim + 1

    @property
    def conv_shape(self) -> None:
        """None: there is no convolution."""
        return None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three projections, then the output projection."""
        heads = Axis("heads", self.num_heads)
        return (
            *linear("W_query", self.d_in, self.key_width, bias=self.qkv_bias, axes=(heads, "embed")),
            *linear("W_key", self.d_in, self.key_width, bias=self.qkv_bias, axes=(heads, "embed")),
            *linear("W_value", self.d_in, self.value_width, bias=self.qkv_bias, axes=(heads, "embed")),
            *linear("out_proj", self.value_width, self.d_out, bias=self.out_bias, axes=("embed", heads)),
        )


EXAMPLES = (
    Example(
        "biases",
        LinearAttentionConfig(8, 2, 3, 5, qkv_bias=True, out_bias=True),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example("weights", LinearAttentionConfig(6, 3, d_out=4, qkv_bias=True), mask="per-head", return_weights=True),
    Example("two-chunks", LinearAttentionConfig(4, 2), tokens=66, batch=None),
    Example("one-token", LinearAttentionConfig(6, 3), tokens=1, batch=2),
)

VARIANT = Variant("LinearAttention", "linear_attention", LinearAttentionConfig, group="modern", examples=EXAMPLES)
