"""Attention whose keys and values are made of one small latent per token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A cache then holds that latent and one key with a rotary position, which all heads share.
"""

from __future__ import annotations

import dataclasses

from ..masks import Mask, causal, sliding_window
from .base import DERIVED, Axis, Config, Example, Parameter, Variant, linear
from .model import below
from .position import Rotary
from .rms_norm import RMSNormConfig
from .rope_scaling import YaRNScaling


@dataclasses.dataclass(frozen=True)
class MultiHeadLatentAttentionConfig(Config):
    """Sizes of the latents and of the two parts of a head, and biases.

    Attributes:
        d_in: width of the input.
        num_heads: number of heads.
        latent_dim: width of the latent of keys and values.
        nope_dim: channels of a head's query and key without position, which come from the latents.
        rope_dim: channels of a head's query and of the shared key that have the position.
        value_dim: channels of a head's value.
        query_dim: width of the latent of queries; None makes them of the input itself.
        d_out: width of the output; `d_in` by default.
        bias: whether the projections of the input and the one to the output have biases.
        position: `Rotary` of the `rope_dim` channels, or None where positions come with the input (Kimi Linear).
        mask: who attends to whom, by the places of the tokens in the sequence, without padding on the left.
        scale: factor of the scores; by default ``(nope_dim + rope_dim) ** -0.5``, with YaRN times the square of
            ``0.1 * mscale_all_dim * log(factor) + 1``.
        norm_eps: constant that the norms of the latents add to the mean square.
        dropout: rate at which attention weights are dropped in training.
    """

    d_in: int
    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_dim: int | None = None
    d_out: int = DERIVED
    bias: bool = False
    position: Rotary | None = dataclasses.field(default_factory=lambda: Rotary(pairing="interleaved"))
    mask: Mask = dataclasses.field(default_factory=causal)
    scale: float = DERIVED
    norm_eps: float = 1e-6
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads", "latent_dim", "nope_dim", "rope_dim", "value_dim")
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("d_out", *(() if self.query_dim is None else ("query_dim",)))
        self._require_bools("bias")
        self._require_rates("dropout")
        if not isinstance(self.position, Rotary | None):
            raise TypeError(f"position must be a Rotary or None, got {type(self.position).__name__}")
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask must be a Mask, got {type(self.mask).__name__}")
        if self.position is not None and self.position.width(self.rope_dim) != self.rope_dim:
            raise ValueError(f"dim of Rotary ({self.position.dim}) must be rope_dim ({self.rope_dim})")
        self._resolve("scale", self._default_scale)
        self._require_positive_number("scale")
        self._require_positive_number("norm_eps")

    @property
    def _default_scale(self) -> float:
        scaling = None if self.position is None else self.position.scaling
        magnitude = 1.0
        if isinstance(scaling, YaRNScaling) and scaling.mscale_all_dim:
            magnitude = scaling.magnitude(scaling.mscale_all_dim)
        return float((self.nope_dim + self.rope_dim) ** -0.5) * magnitude * magnitude

    @property
    def latent_norm(self) -> RMSNormConfig:
        """Config of the norm of the latent of keys and values."""
        return RMSNormConfig(self.latent_dim, self.norm_eps)

    @property
    def query_norm(self) -> RMSNormConfig | None:
        """Config of the norm of the latent of queries; None where there is none."""
        return None if self.query_dim is None else RMSNormConfig(self.query_dim, self.norm_eps)

    @property
    def query_source(self) -> int:
        """Width of what queries are made of: their latent, or the input."""
        return self.d_in if self.query_dim is None else self.query_dim

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Queries, with or without a latent; the latent of keys and values, the shared key; projections; output."""
        d_in, heads, bias = self.d_in, self.num_heads, self.bias
        query_latent: tuple[Parameter, ...] = ()
        if self.query_norm is not None:
            width = self.query_norm.emb_dim
            query_latent = (
                *linear("W_query_latent", d_in, width, bias=bias, axes=("latent", "embed")),
                *below("query_norm", self.query_norm.parameters),
            )
        by_head = Axis("heads", heads)
        source = self.query_source
        return (
            *query_latent,
            *linear("W_query", source, heads * (self.nope_dim + self.rope_dim), bias=False, axes=(by_head, "embed")),
            *linear("W_latent", d_in, self.latent_dim, bias=bias, axes=("latent", "embed")),
            *linear("W_key_rope", d_in, self.rope_dim, bias=bias, axes=("head_dim", "embed")),
            *below("latent_norm", self.latent_norm.parameters),
            *linear("W_key", self.latent_dim, heads * self.nope_dim, bias=False, axes=(by_head, "latent")),
            *linear("W_value", self.latent_dim, heads * self.value_dim, bias=False, axes=(by_head, "latent")),
            *linear("out_proj", heads * self.value_dim, self.d_out, bias=bias, axes=("embed", by_head)),
        )


_YARN = YaRNScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.7)

EXAMPLES = (
    Example(
        "deepseek-v3",
        MultiHeadLatentAttentionConfig(
            6, 2, 5, 3, 4, 2, query_dim=4, dropout=0.1, position=Rotary(pairing="interleaved", scaling=_YARN)
        ),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example(
        "deepseek-v2-lite",
        MultiHeadLatentAttentionConfig(5, 3, 4, 2, 2, 6, d_out=7, bias=True),
        mask="per-head",
        return_weights=True,
    ),
    Example("no-positions", MultiHeadLatentAttentionConfig(4, 1, 3, 2, 1, 3, query_dim=2, position=None), batch=None),
    Example(
        "window",
        MultiHeadLatentAttentionConfig(
            4, 2, 3, 2, 4, 2, query_dim=3, bias=True, position=Rotary(), mask=sliding_window(3), norm_eps=1e-2
        ),
    ),
    Example("one-token", MultiHeadLatentAttentionConfig(4, 2, 3, 2, 2, 2), tokens=1, batch=2, return_weights=True),
)

VARIANT = Variant(
    "MultiHeadLatentAttention",
    "multi_head_latent_attention",
    MultiHeadLatentAttentionConfig,
    group="modern",
    examples=EXAMPLES,
)
