"""A row as a table of a TOML file, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...weights.placements import Change
from ...weights.rows import Row
from .common import CHECKS

_ROW_DEFAULTS: dict[str, object] = {
    field.name: {} if field.name == "sizes" else field.default
    for field in dataclasses.fields(Row)
    if field.name not in ("theirs", "ours", "change", "place")
}
"""Attribute of a `Row` that a file may hold next to the names -> its default."""


def row_of(table: Mapping[str, object]) -> Row:
    """Return the row that a table of a TOML file describes; a check has the name of its function."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    values |= {"check": CHECKS[values["check"]]} if "check" in values else {}
    return Row(**values | ({"change": Change(**values["change"])} if "change" in values else {}))


def table_of(row: Row) -> dict[str, object]:
    """Return the table that `row_of` reads."""
    values = {key: getattr(row, key) for key, usual in _ROW_DEFAULTS.items() if getattr(row, key) != usual}
    values |= {"check": row.check.__name__} if row.check is not None else {}
    return {"theirs": row.theirs, **({"ours": row.ours} if row.ours else {}), **values}
