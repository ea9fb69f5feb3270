"""Rows of a table by the names that they cover, so that a name is held against few of them."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from .rows import Row


class Index:
    """Rows by the last two parts of their names.

    Args:
        named: templates of names, with their rows.
    """

    def __init__(self, named: Iterable[tuple[str, Row]]):
        self._exact: dict[tuple[str, ...], list[Row]] = collections.defaultdict(list)
        self._others: list[Row] = []
        for template, row in named:
            ending = tuple(template.replace("{path}", "").split(".")[-2:])
            rows = self._others if any("{" in part for part in ending) else self._exact[ending]
            if not any(one is row for one in rows):
                rows.append(row)

    def find(self, name: str) -> list[Row]:
        """Return the rows that may cover a name."""
        parts = tuple(name.split("."))
        endings = dict.fromkeys((parts[-2:], parts[-1:]))
        return [row for ending in endings for row in self._exact.get(ending, ())] + self._others
