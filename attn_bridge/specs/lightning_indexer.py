"""The indexer that chooses the keys of a query (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

A few narrow heads score every key of a query; attention then goes to the keys with the highest scores alone.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

from .base import Config, Parameter, linear
from .layer_norm import LayerNormConfig
from .model import below
from .position import Pairing


@dataclasses.dataclass(frozen=True)
class Indexer(Config):
    """Sizes of the indexer of `SparseIndexedAttentionConfig`, which gives it its inputs and its rotary positions.

    The score of a key is ``sum over heads of weight * relu(query . key)``; all heads share one key. Of keys with equal
    scores the earliest are chosen. No gradient flows through the choice, so that the indexer's parameters get none.

    Attributes:
        num_heads: number of the indexer's heads.
        head_dim: channels of a head; the first `rope_dim` of the attention have the position.
        top_k: number of keys that a query attends to; all that its mask shows where these are fewer.
        pairing: which channels turn together: ``"half"`` (DeepSeek V3.2) or ``"interleaved"`` (GLM-5).
        norm_eps: constant that the norm of the keys adds to the variance.
    """

    num_heads: int
    head_dim: int
    top_k: int
    pairing: Pairing = "half"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        self._require_positive_ints("num_heads", "head_dim", "top_k")
        self._require_choice("pairing", get_args(Pairing))
        self._require_positive_number("norm_eps")

    @property
    def key_norm(self) -> LayerNormConfig:
        """Config of the norm of the keys."""
        return LayerNormConfig(self.head_dim, self.norm_eps)

    def parameters_of(self, d_in: int, query_dim: int) -> tuple[Parameter, ...]:
        """Return the rows of queries, the shared key, its norm, and the weights of the heads.

        Args:
            d_in: width of the attention's input, of which keys and weights are made.
            query_dim: width of the latent, or of the input, of which queries are made.
        """
        return (
            *linear("W_index_query", query_dim, self.num_heads * self.head_dim, bias=False, axes=("index", "embed")),
            *linear("W_index_key", d_in, self.head_dim, bias=False, axes=("index", "embed")),
            *below("key_norm", self.key_norm.parameters),
            *linear("W_index_weights", d_in, self.num_heads, bias=False, axes=("index", "embed")),
        )
