"""Each use of the table in docs/uses.md works, or is refused in one line."""

from __future__ import annotations

import pytest

from ..uses import processes, sample_uses
from ..uses.table import ABSENT, FAILS, as_markdown, outcome, refusal
from . import backends

FOUND = backends.adapters("uses", "parity_tests.uses")


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "name"),
    [pytest.param(uses, name, id=f"{side}-{name}") for side, uses in FOUND.items() for name in uses.USES],
)
def test_a_use_works_or_is_refused_in_one_line(backend, name):
    assert not outcome(backend.USES[name]).startswith(FAILS)


def test_the_table_tells_works_refusals_and_failures_apart():
    lines = []
    table = processes.rows((sample_uses.__name__,), 5.0, lines.append)
    assert dict(table) == {
        "right": "works",
        "refused": "refused: invalid",
        "wrong": "**fails**: ArithmeticError: off by one",
        "without end": "**fails**: ran past 5 s",
        "crashed": "**fails**: its process ended with status 3",
        "elsewhere": "not tried: no_such_package is not installed",
    }
    assert len(lines) == 5
    assert lines[0].startswith("[1/6] sample_uses: right: works (")
    other = [(*row, f"n.a.: {ABSENT}") for row in table]
    assert "6 uses: 1 works, 1 refused, 6 n.a., 1 not tried, 3 fail." in as_markdown(other)


def test_a_use_that_should_be_refused_and_is_not_fails():
    with pytest.raises(AssertionError, match="was not refused"):
        refusal(lambda: None, ValueError)
