"""Positions of tokens, as data: rotary, ALiBi, relative bias; read by both backends.

Rotary positions turn each pair of channels of query and key by an angle that grows with the position (RoPE, Su et al.,
arXiv 2104.09864), or with one of several positions, such as those of an image; ALiBi lowers a score by the distance
times a slope per head (Press et al., arXiv 2108.12409); a relative bias adds a learned number per head and range of
distances (T5, Raffel et al., arXiv 1910.10683). Frequencies are computed here, in float64, once for both backends; the
backends compute the rest from the positions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import numpy as np

from ..printable import printable
from ..validation import check_number
from .base import LATER
from .rope_scaling import Floats, Scaling, pair_indices, plain_frequencies

__all__ = ["Alibi", "AxesLayout", "Pairing", "RelativeBias", "Rotary", "Sinusoids", "sinusoid_rates"]

MAX_DISTANCE = (1 << 31) - 1
"""Positions are int32 in JAX."""

Pairing = Literal["half", "interleaved", "reversed"]
"""Which channels turn together: ``half`` the i-th of both halves (Hugging Face), ``interleaved`` neighbours (Meta).

``reversed`` turns those of ``half`` the other way round (NanoChat).
"""

AxesLayout = Literal["sections", "interleaved", "axial", "strided"]
"""Which pairs of channels turn by which row of positions, and how fast: see `Rotary`."""


MAX_DIM = 1 << 20
"""Channels that turn; a head with more is that of a broken config, and its table would fill the memory."""

MAX_AXES = 16
"""Rows of positions; published models have 2 to 4."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoPE, arXiv 2104.09864): the first `dim` channels of query and key turn with the position.

    Attributes:
        base: wavelengths go from ``2 pi`` to nearly ``2 pi * base``.
        dim: number of channels that turn, even; None is all of a head.
        pairing: ``"half"`` turns channel ``i`` with ``i + dim // 2``, ``"interleaved"`` ``2 i`` with ``2 i + 1``,
            ``"reversed"`` the pairs of ``half`` by the negative angle.
        scaling: stretches the positions.
        axes: number of pairs of channels that turn by each row of positions ``(rows, B, T)``, such as time, height and
            width; None for one position per token.
        layout: the pairs of a row. ``"sections"``: consecutive pairs (the mrope of Qwen2-VL, arXiv 2409.12191).
            ``"interleaved"``: rows take turns, and row 0 also has the pairs behind the last turn of another row
            (Qwen3-VL, arXiv 2511.21631). Both keep the frequencies of a `Rotary` without axes, so that equal rows are
            plain positions. ``"axial"``: consecutive pairs, whose frequencies start again in each row (the image
            encoder of Qwen2-VL). ``"strided"``: consecutive pairs, where row ``r`` of ``R`` has the frequencies ``r``,
            ``r + R``, ``r + 2 R`` and so on (Pixtral, arXiv 2410.07073). The last two are for images: positions must
            be given, and `scaling` is None.
    """

    base: float = 10000.0
    dim: int | None = None
    pairing: Pairing = "half"
    scaling: Scaling | None = None
    axes: tuple[int, ...] | None = None
    layout: AxesLayout = "sections"

    def __post_init__(self) -> None:
        check_number("base", self.base)
        if not 1 < self.base < math.inf:
            raise ValueError(f"base ({self.base}) must be above 1 and finite")
        object.__setattr__(self, "base", float(self.base))
        if self.dim is not None:
            self._check_dim(self.dim)
        if self.pairing not in get_args(Pairing):
            raise ValueError(
                f"pairing ({printable(repr(self.pairing))}) must be one of {', '.join(map(repr, get_args(Pairing)))}"
            )
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise TypeError(f"scaling must be a Scaling or None, got {type(self.scaling).__name__}")
        if self.layout not in get_args(AxesLayout):
            raise ValueError(
                f"layout ({printable(repr(self.layout))}) must be one of {', '.join(map(repr, get_args(AxesLayout)))}"
            )
        if self.axes is not None:
            self._check_axes(self.axes)
        elif self.layout != "sections":
            raise ValueError(f"layout ({self.layout!r}) of Rotary needs axes")

    def _check_axes(self, values: object) -> None:
        if not isinstance(values, tuple | list):
            raise TypeError(f"axes must be a tuple of integers, got {type(values).__name__}")
        for row, pairs in enumerate(values):
            if isinstance(pairs, bool) or not hasattr(pairs, "__index__"):
                raise TypeError(f"axes[{row}] must be an integer, got {type(pairs).__name__}")
            if not 0 <= pairs <= MAX_DIM:
                raise ValueError(f"axes[{row}] ({printable(pairs)}) must be at least 0 and at most {MAX_DIM}")
        axes = tuple(int(pairs) for pairs in values)
        object.__setattr__(self, "axes", axes)
        if not 2 <= len(axes) <= MAX_AXES:
            raise ValueError(f"number of axes ({len(axes)}) must be at least 2 and at most {MAX_AXES}")
        if self.layout == "strided" and len(set(axes)) > 1:
            raise ValueError(f"axes {axes} must be equal with layout 'strided'")
        turns = [row + len(axes) * (pairs - 1) for row, pairs in enumerate(axes) if row and pairs]
        if self.layout == "interleaved" and any(pair >= sum(axes) for pair in turns):
            raise ValueError(f"axes {axes} must let rows take turns: pair {max(turns)} is beyond the {sum(axes)} pairs")
        if self.is_of_image and self.scaling is not None:
            raise ValueError(f"scaling must be None with layout {self.layout!r}")

    @property
    def num_rows(self) -> int:
        """Rows of positions that it turns by, 0 without `axes`."""
        return len(self.axes or ())

    @property
    def is_of_image(self) -> bool:
        """Whether rows of positions must be given, since no order of tokens gives them."""
        return self.axes is not None and self.layout in ("axial", "strided")

    @property
    def table_factor(self) -> float:
        """Factor of the cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.table_factor

    def width(self, head_dim: int) -> int:
        """Return how many channels of a head turn.

        Raises:
            ValueError: `dim` is not even or above `head_dim`, or `axes` are those of another number of channels.
        """
        dim = head_dim if self.dim is None else self.dim
        self._check_dim(dim)
        if dim > head_dim:
            raise ValueError(f"dim of Rotary ({dim}) must be at most head_dim ({head_dim})")
        if self.axes is not None:
            self.rows(dim)
        if self.scaling is not None:
            self.frequencies(dim)  # a scaling with numbers for other channels says so here
        return dim

    def frequencies(self, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)`` for `dim` turning channels, in radians per position."""
        self._check_dim(dim)
        if self.axes is not None and self.layout == "axial":
            return np.concatenate([plain_frequencies(self.base, 2 * pairs) for pairs in self.axes])
        if self.axes is not None and self.layout == "strided":
            plain = plain_frequencies(self.base, dim)
            return np.concatenate([plain[row :: len(self.axes)] for row in range(len(self.axes))])
        return plain_frequencies(self.base, dim) if self.scaling is None else self.scaling.frequencies(self.base, dim)

    def rows(self, dim: int) -> list[int]:
        """Return the row of positions by which each of the ``dim // 2`` pairs turns; 0 without `axes`.

        Raises:
            ValueError: `axes` are those of another number of channels.
        """
        axes, pairs = self.axes, dim // 2
        if axes is None:
            return [0] * pairs
        if sum(axes) != pairs:
            hint = ": they count pairs, not channels" if sum(axes) == dim else ""
            raise ValueError(f"axes {axes} must add up to half the channels that turn ({pairs}){hint}")
        if self.layout != "interleaved":
            return [row for row, count in enumerate(axes) for _ in range(count)]
        turns = [(pair % len(axes), pair // len(axes)) for pair in range(pairs)]
        return [row if turn < axes[row] else 0 for row, turn in turns]

    @staticmethod
    def _check_dim(dim: Any) -> None:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"dim of Rotary must be an integer, got {type(dim).__name__}")
        if dim < 2 or dim % 2:
            raise ValueError(f"dim of Rotary ({dim}) must be even and at least 2")
        if dim > MAX_DIM:
            raise ValueError(f"dim of Rotary ({dim}) must be at most {MAX_DIM}")


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Scores lowered by the distance between query and key times a slope per head (ALiBi, arXiv 2108.12409)."""

    def slopes(self, num_heads: int) -> Floats:
        """Return the slopes ``(num_heads,)``: the paper's for powers of two, those of BLOOM and MPT for the rest."""
        whole = 2 ** math.floor(math.log2(num_heads))
        slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
        # Every second slope of the series of twice as many heads.
        slopes += [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(num_heads - whole)]
        return np.array(slopes)


@dataclasses.dataclass(frozen=True)
class RelativeBias:
    """A learned number per head and bucket of distances, added to the scores (T5, arXiv 1910.10683).

    The first half of the buckets has a distance each, the other half ranges of distances that grow by a constant
    factor up to `max_distance`; the last bucket also has all larger distances.

    Attributes:
        num_buckets: rows of the table.
        max_distance: distance at which the ranges end.
        bidirectional: whether later keys have separate buckets, the second half of the table; else all of them share
            the bucket of distance 0.
        shared: whether the table comes with each call, from an earlier layer, so that the layer has none (T5).
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    shared: bool = dataclasses.field(default=False, metadata={LATER: True})

    def __post_init__(self) -> None:
        for name in ("num_buckets", "max_distance"):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} of RelativeBias must be an integer, got {type(value).__name__}")
            if value > MAX_DISTANCE:
                raise ValueError(f"{name} of RelativeBias ({printable(value)}) must be at most {MAX_DISTANCE}")
            object.__setattr__(self, name, value.__index__())
        for name in ("bidirectional", "shared"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} of RelativeBias must be a bool, got {type(getattr(self, name)).__name__}")
        least = 4 if self.bidirectional else 2
        if self.num_buckets < least:
            raise ValueError(f"num_buckets of RelativeBias ({self.num_buckets}) must be at least {least}")
        if self.max_distance <= self.num_exact:
            raise ValueError(
                f"max_distance of RelativeBias ({self.max_distance}) must be above the {self.num_exact} distances "
                "that do not share a bucket"
            )

    @property
    def num_per_direction(self) -> int:
        """Number of buckets for the keys on one side of a query."""
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    @property
    def num_exact(self) -> int:
        """Number of distances, from 0, that do not share a bucket."""
        return self.num_per_direction // 2

    def bounds(self) -> list[int]:
        """Return the smallest distance of each bucket after the first, ascending.

        The formula of T5 takes the logarithm of each distance in float32, which this rounds as torch does. A distance
        at which the range would end exactly may so be in the range before.
        """
        exact, ranges = self.num_exact, self.num_per_direction - self.num_exact
        growth = self.max_distance / exact
        whole = _single(math.log(growth))
        # T5 has bucket exact + floor(log(distance / exact) / log(max_distance / exact) * ranges); solved for the
        # distances at which the floor steps up.
        ends = []
        for k in range(1, ranges):
            # A little below the power, whose rounding would else push a whole number up to the next one.
            end = math.ceil(exact * growth ** (k / ranges) * (1.0 - 1e-12))
            steps = _single(_single(_single(math.log(_single(end / exact))) / whole) * ranges)
            ends.append(end + int(steps < k))
        return [*range(1, exact + 1), *ends]


def _single(number: float) -> float:
    """Round a number to float32 by arithmetic, which torch.compile takes for a constant, as it does not NumPy's."""
    mantissa, exponent = math.frexp(number)
    # 24 bits, as float32 has with the leading one; `round` takes the even neighbour of a tie, as float32 does.
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


Sinusoids = Literal["transformer", "tensor2tensor"]
"""Sines, then cosines of positions, by the waves of arXiv 1706.03762, or of its library, whose slowest is longer."""


def sinusoid_rates(kind: Sinusoids, dim: int) -> Floats:
    """Return the angle per position ``(dim // 2,)`` of each sine and cosine.

    The waves grow from a length of ``2 pi`` to one of ``2 pi 10000``, which is that of the last (``tensor2tensor``, and
    Whisper), or would be that of the next (``transformer``).
    """
    half = dim // 2
    return np.asarray(10000.0 ** (-pair_indices(dim) / (max(half - 1, 1) if kind == "tensor2tensor" else half)))
