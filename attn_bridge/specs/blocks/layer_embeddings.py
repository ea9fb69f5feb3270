"""Per-layer embeddings (Gemma 3n and 4): a second table has a row of every token for each block.

With them comes a projection of the token's embedding, one part per block; what both add up to enters a gated sum behind
the sublayers of that block.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

from ..base import Config, Parameter, linear
from ..model import below, table
from ..rms_norm import RMSNormConfig
from .feed_forward import Activation


@dataclasses.dataclass(frozen=True)
class LayerEmbeddingsConfig(Config):
    """The table and the projection in front of the blocks.

    The row of a token, times ``dim ** 0.5``, and the normed projection of its embedding, times ``d_in ** -0.5`` before
    that norm, are added and multiplied by ``2 ** -0.5``.

    Attributes:
        vocab_size: number of tokens that have a row; others take that of token 0.
        d_in: width of the model.
        dim: width of the part of a block.
        layers: number of blocks.
        eps: constant added to the mean square in the norm of each part of the projection.
    """

    vocab_size: int
    d_in: int
    dim: int
    layers: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self._require_positive_ints("vocab_size", "d_in", "dim", "layers")
        object.__setattr__(self, "eps", self.norm.eps)

    @property
    def norm(self) -> RMSNormConfig:
        """Config of the norm of each part of the projection."""
        return RMSNormConfig(self.dim, self.eps)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The table, the projection and its norm."""
        width = self.layers * self.dim
        return (
            table("layer_emb", self.vocab_size, width, "vocab"),
            *linear("layer_linear", self.d_in, width, bias=False),
            *below("layer_norm", self.norm.parameters),
        )


@dataclasses.dataclass(frozen=True)
class LayerInputConfig(Config):
    """The sum behind the sublayers of a block: ``x + norm(proj(activation(gate(x)) * layer_input))``.

    Attributes:
        dim: width of the block's part of the per-layer embeddings.
        activation: of the gate.
    """

    dim: int
    activation: Activation = "gelu_tanh"

    def __post_init__(self) -> None:
        self._require_positive_ints("dim")
        self._require_choice("activation", get_args(Activation))

    def parameters_of(self, width: int) -> tuple[Parameter, ...]:
        """Return the rows of gate and projection in a block of that width; the norm is the block's."""
        return (
            *linear("layer_gate", width, self.dim, bias=False),
            *linear("layer_proj", self.dim, width, bias=False),
        )
