"""GPT-2 as the book builds it (section 4.6; Radford et al. 2019): pre-norm blocks of causal attention."""

from __future__ import annotations

import dataclasses

from .base import Parameter, linear
from .blocks.feed_forward import FeedForwardConfig
from .layer_norm import LayerNormConfig
from .model import ModelConfig, accepts_use_cache, below, table
from .multi_head_attention import MultiHeadAttentionConfig


@accepts_use_cache
@dataclasses.dataclass(frozen=True)
class GPTModelConfig(ModelConfig):
    """The book's config dict, key by key: sizes, heads, blocks, the one dropout rate, and q/k/v biases."""

    vocab_size: int
    context_length: int
    emb_dim: int
    n_heads: int
    n_layers: int
    drop_rate: float = 0.0
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        self._require_positive_ints("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers")
        self._require_rates("drop_rate")
        self._require_bools("qkv_bias")
        self._require_multiple("emb_dim", "n_heads")

    @property
    def feed_forward(self) -> FeedForwardConfig:
        """Config of the feed-forward layers of a block."""
        return FeedForwardConfig(self.emb_dim, 4 * self.emb_dim, "gelu_tanh", gated=False, bias=True)

    @property
    def attention(self) -> MultiHeadAttentionConfig:
        """Config of the attention of a block."""
        return MultiHeadAttentionConfig(
            self.emb_dim, self.emb_dim, self.context_length, self.drop_rate, self.n_heads, self.qkv_bias
        )

    @property
    def norm(self) -> LayerNormConfig:
        """Config of every norm."""
        return LayerNormConfig(self.emb_dim)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Two embedding tables, the blocks one by one, the last norm, and the output head, which has no bias."""
        block = (
            *below("att", self.attention.parameters),
            *below("ff", self.feed_forward.parameters),
            *below("norm1", self.norm.parameters),
            *below("norm2", self.norm.parameters),
        )
        return (
            table("tok_emb", self.vocab_size, self.emb_dim, "vocab"),
            table("pos_emb", self.context_length, self.emb_dim, "positions"),
            *(row for index in range(self.n_layers) for row in below(f"trf_blocks.{index}", block)),
            *below("final_norm", self.norm.parameters),
            *linear("out_head", self.emb_dim, self.vocab_size, bias=False, axes=("vocab", "embed")),
        )
