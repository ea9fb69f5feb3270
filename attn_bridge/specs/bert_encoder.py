"""BERT's encoder (Devlin et al., arXiv 1810.04805): post-norm layers of attention to every token, no pooler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Self

from ..printable import printable
from ..validation import check_number
from .base import Parameter
from .blocks.feed_forward import FeedForwardConfig
from .layer_norm import LayerNormConfig
from .model import ModelConfig, accepts_use_cache, below, table
from .multi_head_attention import MultiHeadAttentionConfig

_ONLY = {"model_type": "bert", "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""Keys of a ``config.json`` that would mean another model, and the one value that they may have."""


@accepts_use_cache
@dataclasses.dataclass(frozen=True)
class BertEncoderConfig(ModelConfig):
    """The keys of a Hugging Face ``BertConfig`` that affect the encoder's computation, with that class's defaults."""

    takes_foreign_keys: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        self._require_positive_ints("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        self._require_positive_ints("intermediate_size", "max_position_embeddings", "type_vocab_size")
        self._require_rates("hidden_dropout_prob", "attention_probs_dropout_prob")
        self._require_multiple("hidden_size", "num_attention_heads")
        if self.hidden_act != "gelu":
            raise ValueError(f"hidden_act ({printable(repr(self.hidden_act))}) must be 'gelu'")
        check_number("layer_norm_eps", self.layer_norm_eps)
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"layer_norm_eps ({self.layer_norm_eps}) must be positive and finite")
        object.__setattr__(self, "layer_norm_eps", float(self.layer_norm_eps))

    @classmethod
    def read(cls, config: Self | Mapping[str, object]) -> Self:
        """Return a config as it is, and a dict, such as a model's ``config.json``, as one; other keys are left out.

        Raises:
            TypeError: `config` is neither.
            ValueError: keys that are missing, a value that does not fit, or a key that means another model.
        """
        for key, value in _ONLY.items():
            if isinstance(config, Mapping) and config.get(key, value) != value:
                raise ValueError(f"{key} ({printable(repr(config[key]))}) must be {value!r}")
        return super().read(config)

    @property
    def attention(self) -> MultiHeadAttentionConfig:
        """Sizes of the attention of a layer; it is not causal."""
        rate = self.attention_probs_dropout_prob
        width, longest = self.hidden_size, self.max_position_embeddings
        return MultiHeadAttentionConfig(width, width, longest, rate, self.num_attention_heads, qkv_bias=True)

    @property
    def feed_forward(self) -> FeedForwardConfig:
        """Config of the feed-forward layers of a layer."""
        return FeedForwardConfig(self.hidden_size, self.intermediate_size, "gelu", gated=False, bias=True)

    @property
    def norm(self) -> LayerNormConfig:
        """Config of every norm."""
        return LayerNormConfig(self.hidden_size, self.layer_norm_eps)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Three embedding tables and their norm, then the layers one by one."""
        layer = (
            *below("att", self.attention.parameters),
            *below("norm1", self.norm.parameters),
            *below("ff", self.feed_forward.parameters),
            *below("norm2", self.norm.parameters),
        )
        return (
            table("tok_emb", self.vocab_size, self.hidden_size, "vocab"),
            table("pos_emb", self.max_position_embeddings, self.hidden_size, "positions"),
            table("type_emb", self.type_vocab_size, self.hidden_size, "types"),
            *below("emb_norm", self.norm.parameters),
            *(row for index in range(self.num_hidden_layers) for row in below(f"layers.{index}", layer)),
        )
