"""Which key heads the query heads of a device read, where heads are grouped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def heads_to_hold(heads: int, key_heads: int, devices: int) -> NDArray[np.int_]:
    """Return for each device the key heads that it needs, ``(devices, n)``.

    Each device has ``heads // devices`` query heads, whose key heads it then holds in groups of one size, as
    `functional.dot_product_attention` has them; where groups are cut unevenly, a key head for every query head.
    """
    read = np.arange(heads).reshape(devices, -1) // (heads // key_heads)
    size = read.shape[1] // len(np.unique(read[0])) or 1
    kept = read[:, ::size]
    is_grouped = read.shape[1] % size == 0 and np.array_equal(kept.repeat(size, 1)[:, : read.shape[1]], read)
    return kept if is_grouped else read
