"""JAX's random numbers in NumPy, bit for bit.

`key`, `fold_in`, `split`, `bits`, `uniform` and `bernoulli` give what `jax.random` gives with its default generator
(``threefry2x32``, partitionable). A key is two uint32 words, ``(..., 2)``, as `jax.random.key_data` has them.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .fused import multiply_add

Words: TypeAlias = NDArray[np.uint32]
Shape: TypeAlias = int | Sequence[int]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Bits by which threefry rotates, in rounds 0 to 3 and 4 to 7; then again, 20 rounds in all."""

PARITY = 0x1BD11BDA
"""Constant that is XORed into the third word of the key schedule."""

# 4 Mi words take 205, 183 and 246 ms by blocks of 2**14, 2**16 and 2**18, 348 ms by 2**12 and 370 ms by 2**20 (one
# core).
BLOCK = 1 << 16
"""Elements drawn at a time: their temporaries fit the cache."""

FLOATS = {np.dtype(name): info for name, info in (("float16", (16, 10)), ("float32", (32, 23)), ("float64", (64, 52)))}
FLOATS[np.dtype(ml_dtypes.bfloat16)] = (8, 7)
"""Floating-point type -> the width of the draw behind it, and how many bits of it become the mantissa."""


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
    # Behind each four rounds the key is added, turned by one word, and to its last word the number of the group.
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
        TypeError: a seed that is not an integer.
        ValueError: a seed outside -2**63 to 2**63 - 1.
    """
    seed = as_seed(seed, 1 << 63)
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
    """Encrypt one counter in Python integers, so that the cost of a key does not depend on an array library's calls."""
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


def bits(key: Words, shape: Shape = (), dtype: Any = None, *, x64: bool = False) -> np.ndarray:
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
    for start in range(0, result.size, BLOCK):
        part = result[start : start + BLOCK]
        y0, y1 = threefry2x32(key, *_counters(start, part.size))
        part[:] = y0.astype(np.uint64) << np.uint64(32) | y1 if dtype.itemsize == 8 else (y0 ^ y1).astype(dtype)
    return result.reshape(shape)


def uniform(
    key: Words, shape: Shape = (), dtype: Any = None, minval: float = 0.0, maxval: float = 1.0, *, x64: bool = False
) -> np.ndarray:
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
    if dtype not in FLOATS:
        raise ValueError(f"dtype of uniform must be float16, bfloat16, float32 or float64, got {dtype.name}")
    width, mantissa = FLOATS[dtype]
    integer = np.dtype(f"uint{8 * dtype.itemsize}")
    draw = bits(key, shape, f"uint{width}").astype(integer) >> integer.type(width - mantissa)
    # One in the exponent and random bits in the mantissa are uniform over [1, 2).
    unity = np.ones((), dtype)
    unit = (draw | unity.view(integer)).view(dtype) - unity
    # A Python float is a float32 to JAX, unless x64 is on.
    wide = np.dtype(np.float64 if x64 or dtype.itemsize == 8 else np.float32)
    low: np.ndarray = np.asarray(minval, wide).astype(dtype)
    high: np.ndarray = np.asarray(maxval, wide).astype(dtype)
    if low == 0 and high == 1:
        return np.asarray(unit)
    return np.asarray(np.maximum(low, multiply_add(unit, high - low, low)))


def bernoulli(key: Words, p: object = 0.5, shape: Shape | None = None, *, x64: bool = False) -> NDArray[np.bool_]:
    """Draw True with probability `p`, as ``jax.random.bernoulli(key, p, shape)`` does.

    Args:
        key: two uint32 words.
        p: a Python float, which draws in float32, in float64 with `x64`: other masks; or a floating-point array, which
            draws in its own type.
        shape: of the result; that of `p` by default.
        x64: whether as under ``jax_enable_x64``.
    """
    p = np.asarray(p, np.dtype("float64" if x64 else "float32") if isinstance(p, float) else None)
    if p.dtype not in FLOATS:
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
    """Check that a key is a single one of two words."""
    if tuple(shape) != (2,):
        raise ValueError(f"{name} takes one key of two words, got words of shape {tuple(shape)}")


def check_fold_in(data: int) -> None:
    """Check that an integer can be folded into a key, as in JAX."""
    if not 0 <= data < 1 << 32:
        raise ValueError(f"data ({data}) of fold_in must be from 0 to 2**32 - 1")


def as_seed(seed: int, end: int) -> int:
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
