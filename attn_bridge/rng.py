"""The random streams that both frameworks can draw, in NumPy: JAX's threefry and torch's Mersenne Twister.

JAX: `key`, `fold_in`, `split`, `bits`, `uniform` and `bernoulli` give what `jax.random` gives with its default
generator (``threefry2x32``, partitionable), bit for bit. A key is two uint32 words, ``(..., 2)``, as
`jax.random.key_data` has them. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.

torch: `TorchGenerator` gives what torch's CPU generator gives, bit for bit: `uniform` always, `bernoulli` and `normal`
with torch builds that draw as the x86-64 wheels with AVX2 do (see docs/randomness.md).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["TorchGenerator", "bernoulli", "bits", "fold_in", "key", "split", "threefry2x32", "uniform"]

Words: TypeAlias = NDArray[np.uint32]
Shape: TypeAlias = int | Sequence[int]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Bits by which threefry rotates, in rounds 0 to 3 and 4 to 7; then again, 20 rounds in all."""

PARITY = 0x1BD11BDA
"""What the third word of the key schedule is XORed with."""

_BLOCK = 1 << 16
"""Elements drawn at a time: their temporaries fit the cache."""

_FLOATS = {np.dtype(name): info for name, info in (("float16", (16, 10)), ("float32", (32, 23)), ("float64", (64, 52)))}
_FLOATS[np.dtype(ml_dtypes.bfloat16)] = (8, 7)
"""Floating-point type -> the width of the draw behind it, and how many bits of it become the mantissa."""

try:
    _CPU_FEATURES = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
except (ImportError, AttributeError):  # it is NumPy's own, for want of a public list
    _CPU_FEATURES = {}

COMPUTES_FLOAT16 = any(_CPU_FEATURES.get(name, False) for name in ("AVX512FP16", "AVX512_SPR", "ASIMDHP"))
"""Whether the processor has arithmetic in float16. XLA then rounds ``a * b + c`` in it once, else after each step; JAX
itself draws other numbers there, in float16 between bounds."""


# ---- JAX


def threefry2x32(key: Words, high: Words, low: Words) -> tuple[Words, Words]:
    """Encrypt the counters ``(high, low)`` with a key of two words, in 20 rounds.

    Args:
        key: two uint32 words.
        high: upper words of the counters, any shape that broadcasts with `low`.
        low: lower words.
    """
    first, second = (int(word) for word in np.asarray(key, np.uint32))
    schedule = (first, second, first ^ second ^ PARITY)
    shape = np.broadcast_shapes(np.shape(high), np.shape(low))
    x0 = np.broadcast_to(np.asarray(high, np.uint32), shape).reshape(-1) + np.uint32(schedule[0])
    x1 = np.broadcast_to(np.asarray(low, np.uint32), shape).reshape(-1) + np.uint32(schedule[1])
    shifted = np.empty_like(x1)
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 += x1
            np.right_shift(x1, np.uint32(32 - r), out=shifted)
            x1 <<= np.uint32(r)
            x1 |= shifted
            x1 ^= x0
        x0 += np.uint32(schedule[(i + 1) % 3])
        x1 += np.uint32((schedule[(i + 2) % 3] + i + 1) & 0xFFFFFFFF)
    return x0.reshape(shape), x1.reshape(shape)


def key(seed: int, *, x64: bool = False) -> Words:
    """Return the two words of `jax.random.key(seed)`.

    Args:
        seed: an integer from -2**63 to 2**63 - 1.
        x64: whether as under ``jax_enable_x64``; without it JAX cuts a seed to its lower 32 bits, and so does this.

    Raises:
        TypeError: a seed that is no integer.
        ValueError: a seed outside -2**63 to 2**63 - 1.
    """
    seed = _as_seed(seed, 1 << 63)
    return np.array([seed >> 32 & 0xFFFFFFFF if x64 else 0, seed & 0xFFFFFFFF], np.uint32)


def fold_in(key: Words, data: int) -> Words:
    """Return the two words of ``jax.random.fold_in(key, data)``.

    Raises:
        ValueError: `data` outside 0 to 2**32 - 1, or more keys than one.
    """
    check_single("fold_in", np.shape(key))
    check_fold_in(data)
    return np.array(threefry_words(int(key[0]), int(key[1]), 0, int(data)), np.uint32)


def threefry_words(first: int, second: int, high: int, low: int) -> tuple[int, int]:
    """Encrypt one counter, in Python's integers: what a key costs must not depend on an array library's calls."""
    schedule = (first, second, first ^ second ^ PARITY)
    x0, x1 = high + schedule[0] & 0xFFFFFFFF, low + schedule[1] & 0xFFFFFFFF
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = x0 + x1 & 0xFFFFFFFF
            x1 = (x1 << r & 0xFFFFFFFF | x1 >> 32 - r) ^ x0
        x0, x1 = x0 + schedule[(i + 1) % 3] & 0xFFFFFFFF, x1 + schedule[(i + 2) % 3] + i + 1 & 0xFFFFFFFF
    return x0, x1


def split(key: Words, num: Shape = 2) -> Words:
    """Return ``num`` keys, ``(*num, 2)``, as `jax.random.split` does; key ``i`` is also ``fold_in(key, i)``."""
    check_single("split", np.shape(key))
    shape = as_shape(num)
    high, low = _counters(0, math.prod(shape))
    return np.stack(threefry2x32(key, high, low), -1).reshape(*shape, 2)


def bits(key: Words, shape: Shape = (), dtype: Any = None, *, x64: bool = False) -> NDArray[Any]:
    """Return random bits as ``jax.random.bits(key, shape, dtype)`` does.

    Args:
        key: two uint32 words.
        shape: of the result.
        dtype: an unsigned type; uint32 by default, uint64 with `x64`.
        x64: whether as under ``jax_enable_x64``. A 64-bit type asked for by name is drawn as JAX draws it there.
    """
    check_single("bits", np.shape(key))
    dtype = np.dtype(("uint64" if x64 else "uint32") if dtype is None else dtype)
    if dtype.kind != "u":
        raise ValueError(f"dtype of bits must be an unsigned integer type, got {dtype.name}")
    shape = as_shape(shape)
    result = np.empty(math.prod(shape), dtype)
    for start in range(0, result.size, _BLOCK):
        part = result[start : start + _BLOCK]
        y0, y1 = threefry2x32(key, *_counters(start, part.size))
        part[:] = y0.astype(np.uint64) << np.uint64(32) | y1 if dtype.itemsize == 8 else (y0 ^ y1).astype(dtype)
    return result.reshape(shape)


def uniform(
    key: Words,
    shape: Shape = (),
    dtype: Any = None,
    minval: float = 0.0,
    maxval: float = 1.0,
    *,
    x64: bool = False,
) -> NDArray[Any]:
    """Draw from U[minval, maxval) as ``jax.random.uniform(key, shape, dtype, minval, maxval)`` does.

    Args:
        key: two uint32 words.
        shape: of the result.
        dtype: float16, bfloat16, float32 or float64; float32 by default, float64 with `x64`.
        minval: lower bound.
        maxval: upper bound.
        x64: whether as under ``jax_enable_x64``.
    """
    dtype = np.dtype(("float64" if x64 else "float32") if dtype is None else dtype)
    if dtype not in _FLOATS:
        raise ValueError(f"dtype of uniform must be float16, bfloat16, float32 or float64, got {dtype.name}")
    width, mantissa = _FLOATS[dtype]
    integer = np.dtype(f"uint{8 * dtype.itemsize}")
    draw = bits(key, shape, f"uint{width}").astype(integer) >> integer.type(width - mantissa)
    # One in the exponent and random bits in the mantissa are uniform over [1, 2).
    one = np.ones((), dtype)
    unit = (draw | one.view(integer)).view(dtype) - one
    # A Python float is a float32 to JAX, unless x64 is on.
    wide = np.dtype(np.float64 if x64 or dtype.itemsize == 8 else np.float32)
    low: NDArray[Any] = np.asarray(minval, wide).astype(dtype)
    high: NDArray[Any] = np.asarray(maxval, wide).astype(dtype)
    if low == 0 and high == 1:
        return np.asarray(unit)
    return np.asarray(np.maximum(low, multiply_add(unit, high - low, low)))


def bernoulli(key: Words, p: Any = 0.5, shape: Shape | None = None, *, x64: bool = False) -> NDArray[np.bool_]:
    """Draw True with probability `p`, as ``jax.random.bernoulli(key, p, shape)`` does.

    Args:
        key: two uint32 words.
        p: a Python float, which draws in float32, in float64 with `x64`: other masks; or a floating-point array, which
            draws in its own type.
        shape: of the result; that of `p` by default.
        x64: whether as under ``jax_enable_x64``.
    """
    p = np.asarray(p, np.dtype("float64" if x64 else "float32") if isinstance(p, float) else None)
    if p.dtype not in _FLOATS:
        raise TypeError(f"p of bernoulli must be floating point, got {p.dtype.name}")
    return np.asarray(uniform(key, p.shape if shape is None else shape, p.dtype) < p)


def as_shape(shape: Shape) -> tuple[int, ...]:
    """Return a shape, or one number of elements, as a tuple.

    Raises:
        ValueError: a negative size.
    """
    sizes = tuple(int(size) for size in ((shape,) if isinstance(shape, (int, np.integer)) else shape))
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape {sizes} must not have negative sizes")
    return sizes


def check_single(name: str, shape: Sequence[int]) -> None:
    """Refuse anything but one key of two words."""
    if tuple(shape) != (2,):
        raise ValueError(f"{name} takes one key of two words, got words of shape {tuple(shape)}")


def check_fold_in(data: int) -> None:
    """Refuse what JAX can't fold into a key."""
    if not 0 <= data < 1 << 32:
        raise ValueError(f"data ({data}) of fold_in must be from 0 to 2**32 - 1")


def _as_seed(seed: int, end: int) -> int:
    """Return a seed as a Python integer, from -2**63 up to `end`."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed ({seed!r}) must be an integer")
    if not -(1 << 63) <= seed < end:
        raise ValueError(f"seed ({seed}) must be from -2**63 to 2**{end.bit_length() - 1} - 1")
    return int(seed)


def _counters(start: int, count: int) -> tuple[Words, Words]:
    """Return the upper and lower words of `count` counters from `start` on."""
    counters = np.arange(start, start + count, dtype=np.uint64)
    return (counters >> np.uint64(32)).astype(np.uint32), counters.astype(np.uint32)


# ---- a * b + c as the frameworks' kernels round it


def multiply_add(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:
    """Return ``a * b + c``: rounded once in float32 and float64, after each operation in bfloat16.

    In float16 it is rounded once where the processor computes in float16 (`COMPUTES_FLOAT16`).
    """
    dtype = np.result_type(a)
    wider = {"float32": np.float64, "float16": np.float32}.get(dtype.name)
    if wider is not None and (dtype != np.float16 or COMPUTES_FLOAT16):
        # The product of two is exact in the wider type.
        product = a.astype(wider) * b.astype(wider)
        return np.asarray(_add_to_odd(product, np.broadcast_to(c.astype(wider), product.shape)).astype(dtype))
    if dtype == np.float64:
        return _fused_double(a, b, c)
    return np.asarray(a * b + c)


def _two_sum(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rounded sum and its error."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _add_to_odd(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Add in float64 or float32, rounding what is not exact to the neighbour with an odd mantissa.

    Such a sum can be rounded once more, to a shorter type, as if it had not been rounded before (Boldo and Melquiond,
    "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    total, error = _two_sum(a, b)
    total = np.asarray(total)
    raw = total.view(f"i{total.itemsize}")
    step = np.where((error > 0) == (total > 0), 1, -1).astype(raw.dtype)
    return np.asarray((raw + np.where((error != 0) & (raw & 1 == 0), step, 0).astype(raw.dtype)).view(total.dtype))


def _fused_double(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:
    """Return ``a * b + c`` in float64, rounded once (Boldo and Melquiond, as above)."""

    def halves(x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        scaled = x * 134217729.0  # 2**27 + 1
        upper = scaled - (scaled - x)
        return upper, x - upper

    product = a * b
    (a_upper, a_lower), (b_upper, b_lower) = halves(a), halves(b)
    rest = ((a_upper * b_upper - product) + a_upper * b_lower + a_lower * b_upper) + a_lower * b_lower
    high, low = _two_sum(np.broadcast_to(c, rest.shape), rest)
    total, error = _two_sum(product, high)
    return np.asarray(total + _add_to_odd(low, error))


# ---- torch


class TorchGenerator:
    """What torch's CPU generator draws after ``torch.manual_seed(seed)``: a Mersenne Twister (MT19937).

    Args:
        seed: an integer from -2**63 to 2**64 - 1; as in torch, its lower 32 bits decide.

    Raises:
        TypeError: a seed that is no integer.
        ValueError: a seed outside these.
    """

    def __init__(self, seed: int):
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> TorchGenerator:
        """Start again, as ``torch.manual_seed(seed)`` does."""
        self._words = np.random.RandomState(_as_seed(seed, 1 << 64) & 0xFFFFFFFF)
        self._next_normal: float | None = None
        return self

    def words(self, count: int) -> Words:
        """Return the next `count` words of the generator."""
        return self._words.randint(0, 1 << 32, size=count, dtype=np.uint32)

    def uniform(self, shape: Shape, dtype: Any = np.float32, low: float = 0.0, high: float = 1.0) -> NDArray[Any]:
        """Draw as ``torch.empty(shape).uniform_(low, high)`` does, and as ``torch.rand(shape)`` by default."""
        dtype = np.dtype(dtype)
        if dtype not in _FLOATS:
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

    def normal(self, shape: Shape, dtype: Any = np.float32) -> NDArray[Any]:
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

    def _unit(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return draws from U[0, 1): 24 bits of a word in float32, 53 of two in float64."""
        if dtype == np.float32:
            return (self.words(count) & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)
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


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Give parts of a flat array that fit the cache."""
    for start in range(0, array.size, _BLOCK):
        yield array[start : start + _BLOCK]


def _box_muller(unit: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn uniform draws, a multiple of 16, into normal ones, in torch's order: cosines of eight, then their sines."""
    pairs = unit.reshape(-1, 2, 8)
    radius = np.sqrt(np.float32(-2.0) * _log(np.float32(1.0) - pairs[:, 0]))
    sine, cosine = _sine_and_cosine(np.float32(2.0 * math.pi) * pairs[:, 1])
    return np.stack([radius * cosine, radius * sine], 1).reshape(-1)


def _fused(a: NDArray[np.float32], b: Any, c: Any) -> NDArray[np.float32]:
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
_LOG_2 = (-2.12194440e-4, 0.693359375)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_QUARTER_PI = (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)


def _log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the natural logarithm of positive numbers."""
    one = np.float32(1.0)
    raw = np.maximum(x, np.finfo(np.float32).tiny).view(np.int32)
    exponent = ((raw >> 23) - 126).astype(np.float32)
    fraction = (raw & 0x007FFFFF | 0x3F000000).view(np.float32)
    small = fraction < np.float32(math.sqrt(0.5))
    exponent = exponent - small.astype(np.float32)
    x = fraction - one + np.where(small, fraction, np.float32(0.0))
    square = x * x
    y = np.full_like(x, _LOG[0])
    for coefficient in _LOG[1:]:
        y = _fused(y, x, coefficient)
    y = _fused(y * x, square, exponent * np.float32(_LOG_2[0]))
    y = _fused(square, -0.5, y)
    return _fused(exponent, _LOG_2[1], x + y)


def _sine_and_cosine(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return sine and cosine of numbers that are not negative."""
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

    return (
        signed(np.where(plain, sine, cosine), octant & 4),
        signed(np.where(plain, cosine, sine), ~(octant - 2) & 4),
    )
