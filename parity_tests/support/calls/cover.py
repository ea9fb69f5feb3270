"""Parametrise tests so that a cover of their cases always runs, and the rest only in ``make full``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def _marks(runs: bool) -> list[pytest.MarkDecorator]:
    return [] if runs else [pytest.mark.full]


def some(name: str, values: Sequence[Any], always: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrise one argument; values outside of `always` are marked `full`.

    Raises:
        ValueError: a value of `always` is not in `values`.
    """
    if unknown := [value for value in always if value not in values]:
        raise ValueError(f"{unknown[0]!r} is not a value of {name}")
    return pytest.mark.parametrize(name, [pytest.param(value, marks=_marks(value in always)) for value in values])


def rotated(
    names: tuple[str, ...], values: Sequence[Any], others: Sequence[Any], always: Collection[Any] | None = None
) -> pytest.MarkDecorator:
    """Parametrise over a product; each of `values` always runs with one of `others`, in turn; the rest are `full`.

    With at least as many `values` as `others`, every value of both always runs.

    Args:
        names: the arguments of one of `values`, several if it is a tuple of several, and of one of `others`.
        values: the values of all names but the last.
        others: the values of the last name.
        always: those of `values` that always run; all by default.
    """
    turns = iter(range(len(values)))
    picked = [next(turns) % len(others) if always is None or value in always else None for value in values]
    rows = [
        pytest.param(*(value if len(names) > 2 else (value,)), other, marks=_marks(index == turn))
        for value, turn in zip(values, picked, strict=True)
        for index, other in enumerate(others)
    ]
    return pytest.mark.parametrize(names, rows)
