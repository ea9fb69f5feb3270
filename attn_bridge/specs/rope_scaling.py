"""Scalings of rotary positions: the frequencies with which channels turn beyond the context of training."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from ..validation import check_number

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Base of the ways to stretch rotary positions beyond the context that a model was trained with."""

    @property
    def table_factor(self) -> float:
        """Factor of the cosines and sines."""
        return 1.0

    def frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)``, in radians per position."""
        raise NotImplementedError

    def turns_alike(self, tokens: int, other: int) -> bool:
        """Return whether sequences of `tokens` and of `other` tokens rotate each position by the same angles."""
        return True


@dataclasses.dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by `factor` (Chen et al., arXiv 2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        _require_positive(self, "factor")

    def frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)``."""
        return plain_frequencies(base, dim) / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling(Scaling):
    """A larger base instead of smaller positions ("NTK-aware"): high frequencies stay, low ones slow down by `factor`.

    Attributes:
        factor: growth of the context.
        original_context: if given, the base grows with the longest position of a call ("dynamic NTK"): not at all up to
            this number of tokens, then by ``factor * tokens / original_context - (factor - 1)``. Keys in a cache stay
            rotated by the base of their time.
    """

    factor: float
    original_context: int | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "factor", *(() if self.original_context is None else ("original_context",)))

    def frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)``; dynamic ones as they are up to `original_context`."""
        plain = plain_frequencies(base, dim)
        return plain if self.original_context is not None else plain * self.factor ** -self.exponents(dim)

    def exponents(self, dim: int) -> Floats:
        """Return the powers ``(dim // 2,)`` of the growth by which the frequencies are divided: 0 first, 1 last."""
        # With the base times factor ** (dim / (dim - 2)), frequency i is divided by factor ** (2 i / (dim - 2)).
        return pair_indices(dim) / max(dim // 2 - 1, 1)

    def turns_alike(self, tokens: int, other: int) -> bool:
        """Return whether sequences of `tokens` and of `other` tokens rotate each position by the same angles."""
        return self.original_context is None or tokens == other or max(tokens, other) <= self.original_context


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1, arXiv 2407.21783).

    Attributes:
        factor: by how much the context grows.
        low_freq_factor: wavelengths above ``original_context / low_freq_factor`` are stretched by `factor`.
        high_freq_factor: wavelengths below ``original_context / high_freq_factor`` are kept.
        original_context: tokens of the context before.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _require_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_context")
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be at least low_freq_factor ({self.low_freq_factor})"
            )

    def frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)``."""
        plain = plain_frequencies(base, dim)
        # The context divided by the wavelength.
        turns = self.original_context * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0) if width else turns >= self.low_freq_factor
        return (1 - kept) * plain / self.factor + kept * plain


@dataclasses.dataclass(frozen=True)
class YaRNScaling(Scaling):
    """Frequencies that turn often within the context are kept, slow ones stretched (YaRN, arXiv 2309.00071).

    Attributes:
        factor: by how much the context grows.
        original_context: tokens of the context before.
        beta_fast: channels that turn more often than this within the context are kept.
        beta_slow: channels that turn less often are stretched by `factor`; those between are blended along the index.
        attention_factor: factor of the tables; None computes ``0.1 * mscale * log(factor) + 1``, divided by the same
            of `mscale_all_dim` where both are given.
        mscale: see `attention_factor`; None counts as 1.
        mscale_all_dim: see `attention_factor`; DeepSeek multiplies its scale by the square of its part, too.
        truncate: whether the two ends of the blend are rounded to whole channels.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _require_positive(self, "factor", "original_context", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            _require_positive(self, "attention_factor")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value and self.magnitude(value) == 0:
                raise ValueError(f"{name} ({value}) makes a factor of 0 of the tables")

    @property
    def table_factor(self) -> float:
        """Factor of the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def magnitude(self, mscale: float) -> float:
        """Return ``0.1 * mscale * log(factor) + 1``, 1 where nothing is stretched (arXiv 2309.00071, equation 22)."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)``."""
        plain = plain_frequencies(base, dim)

        def index_of(turns: float) -> float:
            """Return the (broken) index of the channel that turns so often within the original context."""
            # Solves base ** (-2 i / dim) * original_context = 2 pi * turns for i.
            return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # As published, against a division by 0; `dim - 1` above, not the last pair `dim / 2 - 1`, is as published, too.
        high = high + 0.001 if low == high else high
        stretched = np.clip((pair_indices(dim) - low) / (high - low), 0.0, 1.0)
        return np.asarray(plain / self.factor * stretched + plain * (1 - stretched), np.float64)


@dataclasses.dataclass(frozen=True)
class LongRoPEScaling(Scaling):
    """Each frequency divided by a separate factor, one for short and one for long sequences (arXiv 2402.13753).

    Attributes:
        short_factors: one per pair of channels, for positions within `original_context`.
        long_factors: one per pair of channels, for all positions of a call that holds one beyond it. Keys in a cache
            stay rotated by the factors of their time.
        original_context: length of the original context in tokens.
        factor: growth of the context.
        attention_factor: factor of the tables; None computes ``sqrt(1 + log(factor) / log(original_context))``, or 1 if
            the context does not grow.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    factor: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "original_context", "factor")
        if self.attention_factor is not None:
            _require_positive(self, "attention_factor")
        for name in ("short_factors", "long_factors"):
            values = tuple(getattr(self, name))
            for index, value in enumerate(values):
                check_number(f"{name}[{index}]", value)
                if not 0 < value < math.inf:
                    raise ValueError(f"{name}[{index}] ({value}) must be positive and finite")
            object.__setattr__(self, name, tuple(float(value) for value in values))
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"number of long_factors ({len(self.long_factors)}) must be that of short_factors "
                f"({len(self.short_factors)})"
            )

    @property
    def table_factor(self) -> float:
        """Factor of the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1 or self.original_context <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))

    def frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)`` of short sequences."""
        return self._divided(base, dim, self.short_factors)

    def long_frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)`` of long ones."""
        return self._divided(base, dim, self.long_factors)

    def turns_alike(self, tokens: int, other: int) -> bool:
        """Return whether sequences of `tokens` and of `other` tokens rotate each position by the same angles."""
        return (tokens > self.original_context) == (other > self.original_context)

    def _divided(self, base: float, dim: int, factors: tuple[float, ...]) -> Floats:
        if len(factors) != dim // 2:
            raise ValueError(f"number of factors ({len(factors)}) must be half the channels that turn ({dim // 2})")
        return plain_frequencies(base, dim) / np.asarray(factors, np.float64)


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """The fastest pairs of channels turn as in a whole head, the rest stays (Gemma 4).

    Unlike `Rotary.dim`, the part does not change which channels are a pair, nor the frequencies of those that turn.

    Attributes:
        part: share of the pairs that turn; their number is rounded down.
        factor: divides the frequencies.
    """

    part: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "part", "factor")
        if self.part > 1:
            raise ValueError(f"part ({self.part}) must be at most 1")

    def frequencies(self, base: float, dim: int) -> Floats:
        """Return the frequencies ``(dim // 2,)``; those of pairs that stay are 0."""
        turns = pair_indices(dim) < int(self.part * dim // 2)
        return np.asarray(np.where(turns, plain_frequencies(base, dim) / self.factor, 0.0), np.float64)


def pair_indices(dim: int) -> Floats:
    """Return the indices ``(dim // 2,)`` of the pairs of channels, as float64 from the start.

    torch.compile traces NumPy as torch, where a quotient of whole numbers is float32.
    """
    return np.arange(dim // 2, dtype=np.float64)


def plain_frequencies(base: float, dim: int) -> Floats:
    """Return the frequencies ``(dim // 2,)`` without any scaling."""
    return np.asarray(base ** (-2 * pair_indices(dim) / dim))


def _require_positive(scaling: Scaling, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        check_number(name, value)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} ({value}) must be positive and finite")
