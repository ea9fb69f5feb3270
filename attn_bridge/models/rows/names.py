"""Names of a whole model: the rows that cover them, and those that go with them and are not there."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Iterable

from ...weights.rows import Row
from ..ours import KEY_BIAS, QUERY_BIAS, TOGETHER


def lacking(names: Iterable[str]) -> list[str]:
    """Return the names of ours that go with the given ones and are not there: queries without keys, a block's gap."""
    names = set(names)
    missing = []
    for endings in TOGETHER:
        stems = {name.removesuffix(ending) for name in names for ending in endings if name.endswith(ending)}
        missing += [stem + ending for stem in stems for ending in endings if stem + ending not in names]
    stems = {name.removesuffix(KEY_BIAS) for name in names if name.endswith(KEY_BIAS)}
    missing += [stem + QUERY_BIAS for stem in stems if stem + QUERY_BIAS not in names]
    if stems:
        stems = {name.removesuffix(QUERY_BIAS) for name in names if name.endswith(QUERY_BIAS)}
        missing += [stem + KEY_BIAS for stem in stems if stem + KEY_BIAS not in names]
    numbers: dict[str, set[int]] = collections.defaultdict(set)
    for name in names:
        for hit in _STACKED.finditer(name):
            numbers[name[: hit.end() - 1]].add(int(name[hit.end() :].partition(".")[0]))
    missing = list(dict.fromkeys(missing))
    return missing + [f"{stem}.{i}" for stem, found in numbers.items() for i in gaps(found, max(found))]


_STACKED = re.compile(r"(?:^|(?<=\.))(?:(?:trf_blocks|heads|experts)\.(?=[0-9]+\.)|layers\.(?=[0-9]+\.att\.))")
"""What blocks are numbered below; other numbers are somebody's own, and may have gaps."""


def gaps(numbers: Collection[int], stop: int) -> Iterable[int]:
    """Return the first numbers below `stop` that are not there; a name may hold any number, so not all of them."""
    return itertools.islice((i for i in range(stop) if i not in numbers), 100)


def stems_of(template: str) -> tuple[str, str]:
    """Return what is in front of the number of a block and of the number below it; "" where it has none."""
    blocks, experts = (template.partition(one) for one in ("{i}", "{j}"))
    return blocks[0] if blocks[1] else "", experts[0] if experts[1] else ""


class Index:
    """Rows by the last two parts of their names, so that a name is held against few of them."""

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
