"""When two sides hold the same numbers: bit by bit in one dtype, number by number where one has a wider dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from attn_parity.compare.driver import _differ

NUMBERS = np.array([[0.5, -1.25, 3.0], [np.nan, 1e-3, 7.0]], np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_same_numbers_in_a_wider_dtype_are_the_same(dtype):
    assert not _differ(NUMBERS, NUMBERS.astype(dtype)).any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_another_number_is_another_in_any_dtype(dtype):
    other = NUMBERS.astype(dtype)
    other[1, 2] += other.dtype.type(0.5)
    assert _differ(NUMBERS, other).sum() == 1


def test_numbers_that_the_narrower_dtype_has_not_are_others():
    assert _differ(np.array([0.1], np.float32), np.array([0.1], np.float32).astype(ml_dtypes.bfloat16)).all()
