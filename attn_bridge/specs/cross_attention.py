"""Attention to another sequence, the context (Vaswani et al., arXiv 1706.03762, section 3.2.3): BART, Whisper."""

from __future__ import annotations

import dataclasses
import math

from ..validation import check_number
from .base import Axis, Config, Example, Parameter, Variant, linear


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
    d_context: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    d_out: int | None = None
    qkv_bias: bool = False
    key_bias: bool | None = None
    out_bias: bool = False
    scale: float | None = None
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
        self._resolve("scale", self._sizes[2] ** -0.5)
        check_number("scale", self.scale)
        if self.scale is None or not 0 < self.scale < math.inf:
            raise ValueError(f"scale ({self.scale}) must be positive and finite")
        object.__setattr__(self, "scale", float(self.scale))

    @property
    def _sizes(self) -> tuple[int, int, int, int, int]:
        """Widths of all query heads and all key/value heads, of one head, of the context, and of the output."""
        kv_heads, head_dim, d_context, d_out = self.num_kv_heads, self.head_dim, self.d_context, self.d_out
        assert kv_heads is not None, "resolved in __post_init__"
        assert head_dim is not None, "likewise"
        assert d_context is not None, "likewise"
        assert d_out is not None, "likewise"
        return self.num_heads * head_dim, kv_heads * head_dim, head_dim, d_context, d_out

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Query of the input, key and value of the context, output projection."""
        query_width, key_width, head_dim, d_context, d_out = self._sizes
        heads, kv_heads = Axis("heads", self.num_heads), Axis("kv_heads", key_width // head_dim)
        return (
            *linear("W_query", self.d_in, query_width, bias=self.qkv_bias, axes=(heads, "embed")),
            *linear("W_key", d_context, key_width, bias=bool(self.key_bias), axes=(kv_heads, "embed")),
            *linear("W_value", d_context, key_width, bias=self.qkv_bias, axes=(kv_heads, "embed")),
            *linear("out_proj", query_width, d_out, bias=self.out_bias, axes=("embed", heads)),
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
