"""How far two sides may be apart: the numbers of the criterion, and what they come to for one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..sides.dtypes import unit_of

MEANING_LIMIT = 1e-12
RMS_LIMIT = 3.0
MAX_LIMIT = 5.0
FLOOR_ULPS = 0.5

GROUP_FACTOR = 4.0
"""A single group may be this many times further off than all groups together: it holds only a few roundings."""

ROUNDING_FACTOR = 100.0
"""Float64 results may differ by this many times what their rounding errors in low precision predict."""

ROWS_TOGETHER = {"bfloat16": 1, "float16": 1, "float32": 4}
"""Rows that any library adds up with errors below the floor: measured in float32, where small products of 20,000 rows
are 6 units off in torch and 0.7 in XLA, larger ones of 2,048 rows 0.4 in torch and 1.9 in XLA (CPU, rms)."""

TABLE_FACTOR = 4.0
"""Tables may explain this many times what moving their entries at random by one unit of float32 does: the errors of a
table that is computed in float32 are a few units, and not at random."""

FLASH_FACTOR = 4.0
"""Fused attention may lose this many times in float64 what two random draws of its formula's roundings do: right pairs
lose up to 1.3 times that."""

FLASH_LIMIT = 1e-9
"""Part of the largest of its kind beyond which fused attention explains nothing in float64: right pairs whose weights
are ten times the usual, and inputs thirty times, lose up to 1.2e-10."""

TABLE_LIMIT = 1e-3
"""Relative difference beyond which tables in float32 are not asked for an explanation."""

LITERAL_LIMIT = 2.0**-23
"""Part of the largest of its kind beyond which literals and branches of float32 accuracy explain nothing: each side
may be off by the unit roundoff of float32, 2**-24, and more than both together is a difference that float32 shows."""

ZERO = 1e-13
"""A gradient below this part of the largest of its kind is zero in exact arithmetic."""


def meaning_limit(errors: Sequence[float], scale: float, meaning_scale: float, dtype: str) -> float:
    """Return the float64 difference that rounding alone may make, as a part of the scale of the kind.

    Rounding errors in low precision show how ill-conditioned the tensor is; in float64 they shrink with the unit. Those
    of the worse side count: if it is the only bad one (a variance that cancels), that is a fault of precision.
    """
    unit = float(np.finfo(np.float64).eps)
    error = max(errors) * (scale / meaning_scale if meaning_scale else 1.0)
    return max(MEANING_LIMIT, ROUNDING_FACTOR * error * unit if math.isfinite(error) and dtype != "float64" else 0.0)


def sum_floor(dtype: str, rows: int) -> float:
    """Return what is allowed beyond the floor, in units of the last place, to a tensor that is a sum over rows.

    The rounding errors of a sum that is taken one row after the other grow with the square root of the rows; which
    libraries do so for which shapes is no fault. In 16 bits each row may be rounded, in 32 bits a block of rows.
    """
    together = ROWS_TOGETHER.get(dtype)
    return FLOOR_ULPS * (math.sqrt(max(rows / together, 1.0)) - 1.0) if together else 0.0


def flushed_below(dtype: str) -> float:
    """Return the size up to which the precision of a tensor is not judged; 0 where every number is kept.

    Processors and compilers may take numbers below the smallest normal one for zero, and do so in the last digits of
    what is not much larger. Nothing computes in float16 without a wider unit behind it, and float64 is far from there.
    """
    if dtype not in ("float32", "bfloat16"):
        return 0.0
    return float(np.finfo(np.float32).tiny) / unit_of(dtype)
