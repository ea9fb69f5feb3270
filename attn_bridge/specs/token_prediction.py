"""A block that predicts one more token ahead, from the states of a model (arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import dataclasses

from .base import Config, Parameter, linear
from .decoder_model import DecoderBlockConfig
from .model import below


@dataclasses.dataclass(frozen=True)
class TokenPredictionConfig(Config):
    """The block behind the projection of states and token embeddings.

    Attributes:
        block: config of the block; its norm's is also that of states, of embeddings and in front of the head.
    """

    block: DecoderBlockConfig

    def __post_init__(self) -> None:
        self._require_kind("block", DecoderBlockConfig)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Two norms, a projection of both vectors, the block, and the norm in front of the head."""
        width, norm = self.block.emb_dim, self.block.norm.parameters
        return (
            *below("token_norm", norm),
            *below("state_norm", norm),
            *linear("projection", 2 * width, width, bias=False),
            *below("trf_block", self.block.parameters),
            *below("final_norm", norm),
        )
