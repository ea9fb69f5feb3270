"""Differential attention: one softmax minus a part of another (Ye et al., arXiv 2410.05258), as DiffLlama runs it."""

from __future__ import annotations

import dataclasses
import math

from ..masks import Mask, causal, sliding_window
from ..validation import check_number
from .base import DERIVED, Axis, Config, Example, Parameter, Variant, linear, vector
from .position import Rotary

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
"""The vectors that the factor of the second softmax is made of."""


@dataclasses.dataclass(frozen=True)
class DifferentialAttentionConfig(Config):
    """Sizes, biases, and the initial factor of the second softmax.

    Head ``i`` of the first half of the heads and the same of the second half are a pair.

    Attributes:
        d_in: width of the input.
        num_heads: query heads, of both halves together.
        num_kv_heads: key/value heads, of both halves together, even and a divisor of `num_heads`, which is the default.
        head_dim: width of a head; ``d_in // num_heads`` by default.
        d_out: width of the output; `d_in` by default.
        qkv_bias: whether query, key and value have biases.
        out_bias: whether the output projection has one.
        position: `Rotary`, or None where positions come with the input.
        mask: which token attends to which, by the places of the tokens in the sequence, without padding on the left.
        lambda_init: initial factor of the second softmax, below 1; see `lambda_of_layer`.
        norm_eps: constant that the norm of a pair adds to the mean square.
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
    """

    d_in: int
    num_heads: int
    num_kv_heads: int = DERIVED
    head_dim: int = DERIVED
    d_out: int = DERIVED
    qkv_bias: bool = False
    out_bias: bool = False
    position: Rotary | None = None
    mask: Mask = dataclasses.field(default_factory=causal)
    lambda_init: float = 0.8
    norm_eps: float = 1e-5
    scale: float = DERIVED

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads")
        if self.head_dim is None:
            self._require_multiple("d_in", "num_heads")
        self._resolve("num_kv_heads", self.num_heads)
        self._resolve("head_dim", self.d_in // self.num_heads)
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("num_kv_heads", "head_dim", "d_out")
        self._require_multiple("num_heads", "num_kv_heads")
        if self.num_kv_heads % 2:
            raise ValueError(f"num_kv_heads ({self.num_kv_heads}) must be even")
        self._require_bools("qkv_bias", "out_bias")
        if not isinstance(self.position, Rotary | None):
            raise TypeError(f"position must be a Rotary or None, got {type(self.position).__name__}")
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask must be a Mask, got {type(self.mask).__name__}")
        if self.position is not None:
            self.position.width(self.head_dim)
        self._resolve("scale", self.head_dim**-0.5)
        self._require_positive_number("scale")
        self._require_positive_number("norm_eps")
        check_number("lambda_init", self.lambda_init)
        if not -math.inf < self.lambda_init < 1:
            raise ValueError(f"lambda_init ({self.lambda_init}) must be finite and below 1")
        object.__setattr__(self, "lambda_init", float(self.lambda_init))

    @staticmethod
    def lambda_of_layer(layer: int) -> float:
        """Return the paper's `lambda_init` of a layer, counted from 0: 0.2 for the first, nearly 0.8 for late ones."""
        return 0.8 - 0.6 * math.exp(-0.3 * layer)

    @property
    def _widths(self) -> tuple[int, int]:
        """Widths of all query heads, and of all key/value heads."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three projections, the output projection, and the four vectors of the factor."""
        query_width, key_width = self._widths
        heads, kv_heads = Axis("heads", self.num_heads), Axis("kv_heads", self.num_kv_heads)
        return (
            *linear("W_query", self.d_in, query_width, bias=self.qkv_bias, axes=(heads, "embed")),
            *linear("W_key", self.d_in, key_width, bias=self.qkv_bias, axes=(kv_heads, "embed")),
            *linear("W_value", self.d_in, key_width, bias=self.qkv_bias, axes=(kv_heads, "embed")),
            *linear("out_proj", query_width, self.d_out, bias=self.out_bias, axes=("embed", heads)),
            *(vector(name, self.head_dim, "head_dim") for name in LAMBDAS),
        )


EXAMPLES = (
    Example(
        "diffllama",
        DifferentialAttentionConfig(8, 4, num_kv_heads=2, qkv_bias=True, out_bias=True, position=Rotary()),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example(
        "two-of-each",
        DifferentialAttentionConfig(5, 4, head_dim=3, d_out=6, lambda_init=0.2, norm_eps=1e-2, scale=0.8),
        mask="per-head",
        return_weights=True,
    ),
    Example("window", DifferentialAttentionConfig(4, 2, mask=sliding_window(3), lambda_init=-0.5), batch=None),
    Example(
        "two-tokens",  # a single one gives both softmaxes the same weight, and what is left of it is normed away
        DifferentialAttentionConfig(4, 2, position=Rotary(pairing="interleaved")),
        tokens=2,
        batch=2,
        return_weights=True,
    ),
)

VARIANT = Variant(
    "DifferentialAttention", "differential_attention", DifferentialAttentionConfig, group="modern", examples=EXAMPLES
)
