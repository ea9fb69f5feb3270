"""The values of small floating point codes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..containers.base import Array, numpy_dtype

BYTES = np.arange(256, dtype=np.uint8)

# A sign, two bits of exponent with a bias of 1, one of mantissa: FP4 of OCP's Microscaling specification (MX 1.0).
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The values of FP4's codes, which MXFP4 and NVFP4 have."""

# Two bits of exponent with a bias of 1, and three of mantissa; an exponent of 0 has no leading 1 (MX 1.0, FP6).
_POSITIVE = np.array([m / 8 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(3) for m in range(8)])
E2M3 = np.concatenate([_POSITIVE, -_POSITIVE])
"""The values of FP6's codes, which MXFP6 has."""

E8M0 = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
"""The values of the bytes of the scales of MXFP4, MXFP6 and MXFP8: powers of two, or NaN."""


def float8_values(kind: str) -> Array:
    """Return the value of each byte of a float8 dtype."""
    return BYTES.view(numpy_dtype(kind)).astype(np.float64)
