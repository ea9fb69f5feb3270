"""Manifold-constrained hyper-connections: several residual streams around a layer (arXiv 2409.19606, 2512.24880)."""

from __future__ import annotations

import dataclasses
import itertools

from ...validation import is_floating
from ..base import Config, Parameter, linear, vector


@dataclasses.dataclass(frozen=True)
class HyperConnectionConfig(Config):
    """Width and number of the streams, and how the matrix that mixes them is made doubly stochastic.

    Attributes:
        emb_dim: width D of a stream, and of the layer's input and output.
        streams: number N of streams.
        iterations: how often rows and columns of the mixing matrix are normalised in turn (Sinkhorn and Knopp).
        eps: constant added to the shares of the streams that are read, to the matrix, and to the sums that it is
            divided by.
        norm_eps: constant added to the mean square of the streams, whose norm the shares are computed from.
        writes: whether a layer's output is added to the streams; without it, they are only read as one, which the
            last connection of a model does.
    """

    emb_dim: int
    streams: int = 4
    iterations: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    writes: bool = True

    def __post_init__(self) -> None:
        self._require_positive_ints("emb_dim", "streams", "iterations")
        self._require_positive_number("eps", "norm_eps")
        self._require_bools("writes")

    @property
    def sections(self) -> tuple[int, ...]:
        """Sizes of the parts of a projected token: shares of the input, shares of the output, mixing matrix."""
        return (self.streams, self.streams, self.streams**2) if self.writes else (self.streams,)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where a section ends and the next begins."""
        return tuple(itertools.accumulate(self.sections))[:-1]

    def check_streams(self, shape: tuple[int, ...], dtype: str) -> None:
        """Check the streams: ``(..., streams, emb_dim)``, floating point.

        Raises:
            TypeError: `dtype` is not floating point.
            ValueError: other last dimensions.
        """
        if not is_floating(dtype):
            raise TypeError(f"streams must have a floating-point dtype, got {dtype}")
        if shape[-2:] != (self.streams, self.emb_dim):
            wanted = f"(..., {self.streams}, {self.emb_dim})"
            raise ValueError(f"streams must have shape {wanted} by streams and emb_dim, got {shape}")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """A projection of all streams, a scale for each of its sections, and a bias."""
        return (
            *linear("projection", self.streams * self.emb_dim, sum(self.sections), bias=False),
            vector("scale", len(self.sections), "sections"),
            vector("bias", sum(self.sections)),
        )
