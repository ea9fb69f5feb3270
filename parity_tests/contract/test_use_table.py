"""Each use of the table in docs/uses.md works, or is refused in one line."""

from __future__ import annotations

import pytest

from ..uses.table import Uses, as_markdown, outcome, refusal, rows
from . import backends

FOUND = backends.adapters("uses", "parity_tests.uses")


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "name"),
    [pytest.param(uses, name, id=f"{side}-{name}") for side, uses in FOUND.items() for name in uses.USES],
)
def test_a_use_works_or_is_refused_in_one_line(backend, name):
    assert not outcome(backend.USES[name]).startswith("**fails")


def test_the_table_tells_works_refusals_and_failures_apart():
    torch, jax = Uses(), Uses()

    def wrong() -> None:
        raise ArithmeticError("off by one\nat 3")

    torch.add("right")(lambda: None)
    torch.add("refused")(lambda: refusal(lambda: int("x"), ValueError)[:7])
    torch.add("wrong")(wrong)
    torch.add("elsewhere", needs=("no_such_package",))(wrong)
    table = {name: cells for name, *cells in rows(torch, jax)}
    assert [table[name][0] for name in torch] == [
        "works",
        "refused: invalid",
        "**fails**: ArithmeticError: off by one",
        "not tried: no_such_package is not installed",
    ]
    assert table["right"][1] == "n.a.: has no such thing"
    assert "1 works, 1 refused, 4 n.a., 1 not tried, 1 fail." in as_markdown(rows(torch, jax))


def test_a_use_that_should_be_refused_and_is_not_fails():
    with pytest.raises(AssertionError, match="was not refused"):
        refusal(lambda: None, ValueError)
