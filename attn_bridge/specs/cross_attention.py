"""Attention to another sequence, the context (Vaswani et al., arXiv 1706.03762, section 3.2.3): BART, Whisper."""

from __future__ import annotations

import dataclasses

from .base import DERIVED, Axis, Config, Example, Parameter, Variant, linear


@dataclasses.dataclass(frozen=True)
class CrossAttentionConfig(Config):
    """Widths of both sequences, heads, and biases.

    Attributes:
        d_in: width of the input, which asks.
        num_heads: query heads.
        d_context: width of the context, which is asked; `d_in` by default.
        num_kv_heads: key/value heads, a divisor of `num_heads`; `num_heads` by default.
        head_dim: width of a head; ``d_in // num_heads`` by default.
        d_out: width of the output; `d_in` by default.
        qkv_bias: whether query, key and value have biases.
        key_bias: whether key has one; `qkv_bias` by default (Whisper has all but this one).
        out_bias: whether the output projection has one.
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
        dropout: rate at which attention weights are dropped in training.
    """

    d_in: int
    num_heads: int
    d_context: int = DERIVED
    num_kv_heads: int = DERIVED
    head_dim: int = DERIVED
    d_out: int = DERIVED
    qkv_bias: bool = False
    key_bias: bool = DERIVED
    out_bias: bool = False
    scale: float = DERIVED
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads")
        if self.head_dim is None:
            self._require_multiple("d_in", "num_heads")
        self._resolve("d_context", self.d_in)
        self._resolve("num_kv_heads", self.num_heads)
        self._resolve("head_dim", self.d_in // self.num_heads)
        self._resolve("d_out", self.d_in)
        self._resolve("key_bias", self.qkv_bias)
        self._require_positive_ints("d_context", "num_kv_heads", "head_dim", "d_out")
        self._require_multiple("num_heads", "num_kv_heads")
        self._require_bools("qkv_bias", "key_bias", "out_bias")
        self._require_rates("dropout")
        self._resolve("scale", self.head_dim**-0.5)
        self._require_positive_number("scale")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Query of the input, key and value of the context, output projection."""
        query_width, key_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        heads, kv_heads = Axis("heads", self.num_heads), Axis("kv_heads", self.num_kv_heads)
        return (
            *linear("W_query", self.d_in, query_width, bias=self.qkv_bias, axes=(heads, "embed")),
            *linear("W_key", self.d_context, key_width, bias=self.key_bias, axes=(kv_heads, "embed")),
            *linear("W_value", self.d_context, key_width, bias=self.qkv_bias, axes=(kv_heads, "embed")),
            *linear("out_proj", query_width, self.d_out, bias=self.out_bias, axes=("embed", heads)),
        )


EXAMPLES = (
    Example(
        "whisper",
        CrossAttentionConfig(6, 3, qkv_bias=True, key_bias=False, out_bias=True, dropout=0.1),
        mask="padding",
        context=(5, 6),
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example(
        "shared-heads",
        CrossAttentionConfig(5, 4, d_context=3, num_kv_heads=2, head_dim=2, d_out=7, qkv_bias=True, scale=0.9),
        mask="per-head",
        context=(9, 3),
        return_weights=True,
    ),
    Example("no-biases", CrossAttentionConfig(4, 1, d_context=5), context=(8, 5), batch=None),
    Example("one-token", CrossAttentionConfig(4, 2, out_bias=True), tokens=1, context=(3, 4), batch=2),
)

VARIANT = Variant("CrossAttention", "cross_attention", CrossAttentionConfig, group="modern", examples=EXAMPLES)
