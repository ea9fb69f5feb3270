"""Rows and columns of matrices that no gradient reached, over all samples."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.verdict.notes import MAX_RANGES, Reached, ranges


def gradient(*places):
    """Return a gradient of 6 rows and 4 columns that is 0 everywhere else."""
    found = np.zeros((6, 4), np.float32)
    for place in places:
        found[place] = -2.0
    return found


def noted(*gradients):
    reached = Reached()
    for one in gradients:
        reached.note("grad head.weight", one)
    return reached


ROWS = "3 of 6 rows of head.weight: no gradient reached 0, 4-5"
COLUMNS = "1 of 4 columns of head.weight: no gradient reached 2"


def test_rows_and_columns_of_all_samples_are_listed():
    assert list(noted(gradient((1, 0), (2, 1)), gradient((3, 3))).unreached()) == [ROWS, COLUMNS]


def test_what_others_found_is_joined():
    reached = noted(gradient((1, 0), (2, 1)))
    reached.join(noted(gradient((3, 3))))
    assert list(reached.unreached()) == [ROWS, COLUMNS]
    empty = Reached()
    empty.join(reached)
    assert list(empty.unreached()) == [ROWS, COLUMNS]


def test_a_matrix_without_any_gradient_or_with_all_is_not_listed():
    every = gradient(*((row, row % 4) for row in range(6)))
    assert list(noted(gradient()).unreached()) == list(noted(every).unreached()) == []


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1, 2], "0-2"),
        ([0, 2, 3, 7], "0, 2-3, 7"),
        (list(range(0, 2 * MAX_RANGES, 2)), ", ".join(map(str, range(0, 2 * MAX_RANGES, 2)))),
        (list(range(0, 2 * MAX_RANGES + 2, 2)), ", ".join(map(str, range(0, 2 * MAX_RANGES, 2))) + ", ..."),
    ],
)
def test_numbers_are_written_as_ranges(numbers, text):
    assert ranges(np.array(numbers)) == text
