"""Alternating updates (AltUp, arXiv 2301.13310): several streams per token, of which each block updates one.

A block predicts all streams from all of them, runs its sublayers on one, and corrects all by what that one gained.
"""

from __future__ import annotations

import dataclasses

from ...validation import check_integer
from ..base import Config, Parameter, linear, vector
from ..model import below
from ..rms_norm import RMSNormConfig


@dataclasses.dataclass(frozen=True)
class AlternatingUpdatesConfig(Config):
    """The streams, and how a block predicts and corrects them (Gemma 3n).

    Attributes:
        d_in: width of a stream.
        num_streams: number of streams.
        active: number of the stream that the sublayers read.
        eps: constant added to the mean square in the norm of the router's input.
        scale_corrected: whether the corrected stream is multiplied by a learned vector before the gate of the per-layer
            embeddings.
    """

    d_in: int
    num_streams: int
    active: int = 0
    eps: float = 1e-6
    scale_corrected: bool = True

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_streams")
        if self.num_streams < 2:
            raise ValueError(f"num_streams ({self.num_streams}) must be at least 2")
        check_integer("active", self.active)
        if not 0 <= self.active < self.num_streams:
            raise ValueError(f"active ({self.active}) must be at least 0 and below num_streams ({self.num_streams})")
        object.__setattr__(self, "eps", self.norm.eps)
        self._require_bools("scale_corrected")

    @property
    def norm(self) -> RMSNormConfig:
        """Config of the norm of the router's input."""
        return RMSNormConfig(self.d_in, self.eps)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The router and its norm, both sets of coefficients, and the vector."""
        streams = self.num_streams
        return (
            vector("corrected_scale", self.d_in),
            *linear("correction", streams, streams, bias=False),
            *linear("prediction", streams, streams * streams, bias=False),
            *linear("stream_router", self.d_in, streams, bias=False),
            *below("stream_norm", self.norm.parameters),
        )

    @property
    def ends(self) -> tuple[Parameter, ...]:
        """Projections to the further streams in front of the blocks, and from them behind the blocks."""
        return tuple(
            row
            for name in ("stream_in", "stream_out")
            for number in range(self.num_streams - 1)
            for row in linear(f"{name}.{number}", self.d_in, self.d_in, bias=False)
        )
