"""Rows and settings that whole models of several kinds have in common, and what dropped tensors must hold."""

from __future__ import annotations

import numpy as np

from ...specs.position import sinusoid_rates
from ...weights.placements import Shape
from ...weights.rows import Check, Row

Values = np.ndarray

Table = tuple[Row, ...]
"""Rows of the tensors of one layer, below its prefix."""

TIE = {"tie": ("tie_word_embeddings",)}


def is_causal_mask(shape: Shape, start: int, values: Values) -> bool:
    """Whether zeros hide from a token the ones behind it, and nothing else is zero."""
    column, row = _indices(shape, start, values)
    return _is_square(shape) and np.array_equal(values == 0, column > row)


def is_mask_of_window(shape: Shape, start: int, values: Values) -> bool:
    """Whether every row shows the token itself and those before it, all of them or the nearest, and no other."""
    column, row = _indices(shape, start, values)
    distance, is_visible = row - column, values != 0
    far = distance[~is_visible & (distance >= 0)]
    near = distance[is_visible].max(initial=0)
    return _is_square(shape) and bool(distance[is_visible].min(initial=0) >= 0 and far.min(initial=near + 1) > near)


def is_inverted_causal_mask(shape: Shape, start: int, values: Values) -> bool:
    """Whether zeros show a token itself and the ones before it, and nothing else is zero."""
    column, row = _indices(shape, start, values)
    return _is_square(shape) and np.array_equal(values == 0, column <= row)


def is_counted(shape: Shape, start: int, values: Values) -> bool:
    """Whether every row is 0, 1, 2 and so on."""
    return np.array_equal(values, _indices(shape, start, values)[0])


def is_zero(shape: Shape, start: int, values: Values) -> bool:
    """Whether all elements are 0."""
    return not values.any()


def is_hugely_negative(shape: Shape, start: int, values: Values) -> bool:
    """Whether it is one number that keeps a score from mattering after a softmax."""
    # The exponential of -746 and less is 0 in float64.
    return values.size == 1 and bool(values[0] <= -1000)


def is_frequencies(shape: Shape, start: int, values: Values) -> bool:
    """Whether the numbers are positive and fall, as rotary frequencies do."""
    return bool(np.all(values > 0) and np.all(np.isfinite(values)) and np.all(values[1:] <= values[:-1]))


def sinusoids(positions: Values, width: int) -> Values:
    """Return rows of RoFormer's table: of each position the sines, then the cosines of its angles."""
    angles = positions[:, None] * sinusoid_rates("transformer", width)
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)


def is_sinusoids(shape: Shape, start: int, values: Values) -> bool:
    """Whether the numbers are those of `sinusoids`, rounded to any dtype."""
    if len(shape) != 2 or shape[1] % 2:
        return False
    positions = np.arange(start // shape[1], -(-(start + values.size) // shape[1]))
    rows = sinusoids(positions, shape[1]).ravel()[start % shape[1] :][: values.size]
    # Numbers of up to 1 are at most 2**-9 = 0.002 off in bfloat16.
    return bool(np.all(np.abs(values - rows) < 0.01))


def is_rotary_factors(shape: Shape, start: int, values: Values) -> bool:
    """Whether the numbers are at least 1, as factors that divide rotary frequencies are."""
    return bool(np.all(values >= 1) and np.all(np.isfinite(values)))


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        *(is_causal_mask, is_counted, is_frequencies, is_hugely_negative, is_inverted_causal_mask, is_rotary_factors),
        is_zero,
    )
}
"""Name of a check in a file -> the function."""


FREQUENCIES = Row("rotary_emb.inv_freq", reason="rotary frequencies, which are computed", check=is_frequencies)
"""Of attention, in files of before 2023."""


def _is_square(shape: Shape) -> bool:
    return len(shape) >= 2 and shape[-1] == shape[-2]


def _indices(shape: Shape, start: int, values: Values) -> tuple[Values, Values]:
    """Return the column and the row of every element."""
    positions = np.arange(start, start + values.size)
    width, height = (*shape[:-2:-1], *shape[-2:-3:-1], 1, 1)[:2]
    return positions % width, positions // width % height
