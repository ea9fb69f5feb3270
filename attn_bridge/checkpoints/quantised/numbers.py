"""The numbers that quantised ones stand for: the exact product with the scale, rounded once."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from ...weights.changes import rounded
from ..containers.base import Array, numpy_dtype

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""What four bits of MXFP4 stand for."""

_BYTES = np.arange(256, dtype=np.uint8)

E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
"""What a byte of MXFP4's scales stands for: a power of two, or NaN."""

_PAIRS: dict[int, Any] = {1: np.uint16, 2: np.uint32, 4: np.uint64, 8: np.complex128}
"""Bytes of a number -> a dtype that two of them fill."""


def float8_values(kind: str) -> Array:
    """Return what each byte of a float8 dtype stands for."""
    return _BYTES.view(numpy_dtype(kind)).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Makes numbers of a dtype out of quantised ones, or says which of them rounding changes.

    Attributes:
        dtype: what they are rounded to.
        changed: whether it says which ones are changed.
    """

    dtype: np.dtype[Any]
    changed: bool = False

    @property
    def result(self) -> np.dtype[Any]:
        """Dtype of what is made."""
        return np.dtype(bool) if self.changed else self.dtype

    def of(self, values: Array, scales: Array) -> Array:
        """Return the products of float64 values and scales: exact, since both have few bits, then rounded once."""
        with np.errstate(all="ignore"):
            product = values * scales
        lost = np.isnan(product)
        if lost.any():  # the sign of a NaN that a processor makes is its own affair
            product = np.where(lost, np.copysign(np.nan, values), product)
        made = rounded(product, self.dtype)
        if not self.changed:
            return made
        changed: Array = (made.astype(np.float64) != product) & ~lost
        return changed

    def of_pairs(self) -> Array:
        """Return, for every scale of MXFP4 and every byte, the two numbers in that byte, low half first, as one word.

        It is indexed by ``scale * 256 + byte``.
        """
        both = np.stack([E2M1[_BYTES & 15], E2M1[_BYTES >> 4]], axis=-1)
        made = self.of(*np.broadcast_arrays(both[None], E8M0[:, None, None]))
        return np.ascontiguousarray(made).reshape(-1).view(_PAIRS[self.result.itemsize])
