"""The random numbers of torch's CPU generator, in NumPy, bit for bit.

`TorchGenerator.uniform` always, `bernoulli` and `normal` with torch builds that draw as the x86-64 wheels with AVX2 do
(docs/randomness.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fused import multiply_add
from .threefry import BLOCK, FLOATS, Shape, Words, as_seed, as_shape


class TorchGenerator:
    """The draws of torch's CPU generator after ``torch.manual_seed(seed)``: a Mersenne Twister (MT19937).

    Args:
        seed: an integer from -2**63 to 2**64 - 1; as in torch, its lower 32 bits decide.

    Raises:
        TypeError: a seed that is not an integer.
        ValueError: a seed outside this range.
    """

    def __init__(self, seed: int):
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> TorchGenerator:
        """Start again, as ``torch.manual_seed(seed)`` does."""
        self._words = np.random.RandomState(as_seed(seed, 1 << 64) & 0xFFFFFFFF)
        self._next_normal: float | None = None
        return self

    def words(self, count: int) -> Words:
        """Return the next `count` words of the generator."""
        return self._words.randint(0, 1 << 32, size=count, dtype=np.uint32)

    def uniform(self, shape: Shape, dtype: Any = np.float32, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """Draw as ``torch.empty(shape).uniform_(low, high)`` does, and as ``torch.rand(shape)`` by default."""
        dtype = np.dtype(dtype)
        if dtype not in FLOATS:
            raise ValueError(f"dtype of uniform must be float16, bfloat16, float32 or float64, got {dtype.name}")
        wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        lower, upper = np.asarray(low, wide), np.asarray(high, wide)
        shape = as_shape(shape)
        result = np.empty(math.prod(shape), dtype)
        for part in _blocks(result):
            drawn = multiply_add(self._unit(part.size, wide), upper - lower, lower).astype(dtype)
            # The upper bound is excluded; what rounds to it becomes the lower one.
            part[:] = np.where(drawn == upper.astype(dtype), lower.astype(dtype), drawn)
        return result.reshape(shape)

    def bernoulli(self, shape: Shape, p: float = 0.5) -> NDArray[np.bool_]:
        """Draw as ``torch.empty(shape).bernoulli_(p)`` does; a dropout at rate r keeps where ``p = 1 - r`` is True."""
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p ({p}) must be from 0 to 1")
        shape = as_shape(shape)
        result = np.empty(math.prod(shape), np.bool_)
        for part in _blocks(result):
            part[:] = self._unit(part.size, np.dtype(np.float64)) < p
        return result.reshape(shape)

    def normal(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray:
        """Draw as ``torch.randn(shape)`` does: float32 bit for bit where torch runs its AVX2 code, else to 5e-7.

        Raises:
            NotImplementedError: another type than float32.
        """
        if np.dtype(dtype) != np.float32:
            raise NotImplementedError(
                f"normal draws of torch are reproduced in float32 only, got {np.dtype(dtype).name}"
            )
        shape = as_shape(shape)
        size = math.prod(shape)
        # torch draws fewer than 16 in another way, and the last 16 of more again, unless 16 divides their number.
        if size < 16:
            return np.array([self._polar() for _ in range(size)], np.float32).reshape(shape)
        result = np.empty(size, np.float32)
        whole = size - size % 16
        for part in _blocks(result[:whole]):
            part[:] = self._unit(part.size, np.dtype(np.float32))
        if size > whole:
            result[whole:] = self._unit(size - whole, np.dtype(np.float32))
        for part in _blocks(result[:whole]):
            part[:] = _box_muller(part)
        if size > whole:
            result[-16:] = _box_muller(self._unit(16, np.dtype(np.float32)))
        return result.reshape(shape)

    def _unit(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return draws from U[0, 1): 24 bits of a word in float32, 53 of two in float64."""
        if dtype == np.float32:
            return (self.words(count) & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)
        # torch's random64 puts the first word into the upper half.
        pairs = self.words(2 * count).astype(np.uint64)
        joined = (pairs[::2] << np.uint64(32) | pairs[1::2]) & np.uint64((1 << 53) - 1)
        return joined.astype(np.float64) * 2.0**-53

    def _polar(self) -> float:
        """Return one normal draw as torch makes few of them: in pairs, of which the second waits for the next call."""
        if self._next_normal is not None:
            waiting, self._next_normal = self._next_normal, None
            return waiting
        angle, radius = (float(draw) for draw in self._unit(2, np.dtype(np.float64)))
        radius, angle = math.sqrt(-2.0 * math.log1p(-radius)), 2.0 * math.pi * angle
        self._next_normal = radius * math.sin(angle)
        return radius * math.cos(angle)


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Give parts of a flat array that fit the cache."""
    for start in range(0, array.size, BLOCK):
        yield array[start : start + BLOCK]


def _box_muller(unit: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn uniform draws, a multiple of 16, into normal ones, in torch's order: cosines of eight, then their sines."""
    pairs = unit.reshape(-1, 2, 8)
    radius = np.sqrt(np.float32(-2.0) * _log(np.float32(1.0) - pairs[:, 0]))
    sine, cosine = _sine_and_cosine(np.float32(2.0 * math.pi) * pairs[:, 1])
    return np.stack([radius * cosine, radius * sine], 1).reshape(-1)


def _fused(a: NDArray[np.float32], b: object, c: object) -> NDArray[np.float32]:
    """Return ``a * b + c`` in float32, rounded once."""
    return multiply_add(np.asarray(a), np.asarray(b, np.float32), np.asarray(c, np.float32))


# Logarithm, sine and cosine of the Cephes library (Moshier), as its AVX version, which torch ships, rounds them with
# fused multiply-adds.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


# log(2) as a small and a large part (Cody and Waite): the large one has 9 bits, so that its product with an exponent
# is exact in float32.
_LOG_2 = (-2.12194440e-4, 0.693359375)


_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)


# -pi / 4 in three parts (Cody and Waite): few bits in the first two, so that their products with an octant are exact.
_QUARTER_PI = (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)


def _log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the natural logarithm of positive numbers."""
    unity = np.float32(1.0)
    raw = np.maximum(x, np.finfo(np.float32).tiny).view(np.int32)
    exponent = ((raw >> 23) - 126).astype(np.float32)
    # A fraction in [0.5, 1) and its exponent; below sqrt(1/2) it is doubled, so that log is taken close to 1.
    fraction = (raw & 0x007FFFFF | 0x3F000000).view(np.float32)
    small = fraction < np.float32(math.sqrt(0.5))
    exponent = exponent - small.astype(np.float32)
    x = fraction - unity + np.where(small, fraction, np.float32(0.0))
    square = x * x
    y = np.full_like(x, _LOG[0])
    for coefficient in _LOG[1:]:
        y = _fused(y, x, coefficient)
    y = _fused(y * x, square, exponent * np.float32(_LOG_2[0]))
    y = _fused(square, -0.5, y)
    return _fused(exponent, _LOG_2[1], x + y)


def _sine_and_cosine(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return sine and cosine of numbers that are not negative."""
    # 4 / pi; an odd octant is rounded up to the even one behind it, so that what remains is at most pi / 4 in size.
    octant = ((x * np.float32(1.27323954473516)).astype(np.int32) + 1) & ~1
    for part in _QUARTER_PI:
        x = _fused(octant.astype(np.float32), part, x)
    square = x * x
    cosine = _fused(_fused(np.full_like(x, _COSINE[0]), square, _COSINE[1]), square, _COSINE[2])
    cosine = _fused(cosine * square, square, square * np.float32(-0.5)) + np.float32(1.0)
    sine = _fused(_fused(np.full_like(x, _SINE[0]), square, _SINE[1]), square, _SINE[2])
    sine = _fused(sine * square, x, x)
    plain = octant & 2 == 0

    def signed(value: NDArray[np.float32], flip: NDArray[np.int32]) -> NDArray[np.float32]:
        return np.where(flip != 0, -value, value)

    return (signed(np.where(plain, sine, cosine), octant & 4), signed(np.where(plain, cosine, sine), ~(octant - 2) & 4))
