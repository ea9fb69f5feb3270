"""Products and sums rounded once, as a processor's fused multiply-add rounds them."""

from __future__ import annotations

import importlib

import numpy as np

try:
    _CPU_FEATURES = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
except (ImportError, AttributeError):  # it is NumPy's own, for want of a public list
    _CPU_FEATURES = {}

COMPUTES_FLOAT16 = any(_CPU_FEATURES.get(name, False) for name in ("AVX512FP16", "AVX512_SPR", "ASIMDHP"))
"""Whether the processor has arithmetic in float16. XLA then rounds ``a * b + c`` in it once, else after each step; JAX
itself draws other numbers there, in float16 between bounds."""


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
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


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded sum and its error."""
    # TwoSum (Knuth): total + error is a + b exactly, whichever is larger.
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _add_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Add in float64 or float32, rounding inexact results to the neighbour with an odd mantissa.

    Such a sum can be rounded once more, to a shorter type, as if it had not been rounded before (Boldo and Melquiond,
    "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    total, error = _two_sum(a, b)
    total = np.asarray(total)
    raw = total.view(f"i{total.itemsize}")
    step = np.where((error > 0) == (total > 0), 1, -1).astype(raw.dtype)
    return np.asarray((raw + np.where((error != 0) & (raw & 1 == 0), step, 0).astype(raw.dtype)).view(total.dtype))


def _fused_double(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return ``a * b + c`` in float64, rounded once (Boldo and Melquiond, as above)."""

    def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Veltkamp's halves have 26 bits each, so that the products of two halves are exact.
        scaled = x * 134217729.0  # 2**27 + 1
        upper = scaled - (scaled - x)
        return upper, x - upper

    product = a * b
    (a_upper, a_lower), (b_upper, b_lower) = halves(a), halves(b)
    # Dekker's product: product + rest is a * b exactly.
    rest = ((a_upper * b_upper - product) + a_upper * b_lower + a_lower * b_upper) + a_lower * b_lower
    high, low = _two_sum(np.broadcast_to(c, rest.shape), rest)
    total, error = _two_sum(product, high)
    return np.asarray(total + _add_to_odd(low, error))
