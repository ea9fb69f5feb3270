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


def stems_of(row: Row) -> tuple[str, str]:
    """Return what is in front of the number of a block and of the number below it; "" where it has none.

    Theirs of a block, and ours of the number below it: some put it behind what an expert consists of.
    """
    blocks, experts = row.theirs.partition("{i}"), (*row.ours, row.theirs)[0].partition("{j}")
    return blocks[0] if blocks[1] else "", experts[0] if "{j}" in row.theirs else ""
