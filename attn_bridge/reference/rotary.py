"""Rotary positions by their formula (Su et al., arXiv 2104.09864, equation 34), pair by pair."""

from __future__ import annotations

import numpy as np

from ..specs import Rotary
from .attention import as_double


def rotate(heads: np.ndarray, rotary: Rotary, positions: np.ndarray) -> np.ndarray:
    """Turn pairs of channels by their frequency times the position.

    Shapes: `heads` ``([b,] h, t, c)``, `positions` ``(t,)``, ``(b, t)`` or, with axes, ``(rows, b, t)``; gives the
    shape of `heads`.
    """
    heads, positions = as_double(heads), np.asarray(positions, np.float64)
    width = heads.shape[-1] if rotary.dim is None else rotary.dim
    result = heads.copy()
    for pair in range(width // 2):
        row, index, channels = _axis(rotary, pair, width)
        at = positions[row] if positions.ndim == 3 else positions
        at = at[..., None, :] if at.ndim == 2 else at
        frequency = rotary.base ** (-2.0 * index / channels)
        if rotary.scaling is not None:
            frequency = rotary.scaling.frequencies(rotary.base, width)[index]
        first, second = (2 * pair, 2 * pair + 1) if rotary.pairing == "interleaved" else (pair, pair + width // 2)
        first, second = (second, first) if rotary.pairing == "reversed" else (first, second)
        cos, sin = (rotary.table_factor * function(at * frequency) for function in (np.cos, np.sin))
        result[..., first] = heads[..., first] * cos - heads[..., second] * sin
        result[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return result


def _axis(rotary: Rotary, pair: int, width: int) -> tuple[int, int, int]:
    """Return by which row of positions a pair turns, and the index and the number of channels of its frequency."""
    if rotary.axes is None:
        return 0, pair, width
    rows = len(rotary.axes)
    if rotary.layout == "interleaved":  # as Qwen3-VL has it: every third pair from 1 and from 2, the rest stays time's
        matches = [row for row in range(1, rows) if pair in range(row, rows * rotary.axes[row], rows)]
        return (matches or [0])[0], pair, width
    row, within = 0, pair
    while within >= rotary.axes[row]:
        row, within = row + 1, within - rotary.axes[row]
    if rotary.layout == "axial":
        return row, within, 2 * rotary.axes[row]
    return row, row + rows * within if rotary.layout == "strided" else pair, width


def number(x: np.ndarray, attention_mask: np.ndarray | None) -> np.ndarray:
    """Return the positions of tokens ``([b,] t, d)``, ``(t,)`` or ``(b, t)``: from 0 on, padding on the left left out.

    A mask ``(b, t)`` marks padding with False; other masks change nothing.
    """
    numbers = np.arange(x.shape[-2])
    if attention_mask is None or np.ndim(attention_mask) != 2:
        return numbers
    padding = (np.cumsum(attention_mask, -1) == 0).sum(-1, keepdims=True)
    positions = np.maximum(numbers - padding, 0)
    return positions if x.ndim == 3 else positions[0]
