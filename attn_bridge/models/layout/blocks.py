"""Checks blocks of a model against the rows of its layout: missing tensors, and alternatives in the same block."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping

from ...weights.index import stems_of
from ...weights.rows import Row
from ...weights.templates import fill, placeholders
from ..ours import gaps

Matches = Mapping[str, tuple[Row, dict[str, str]]]
"""Outside name -> the row that covers it, and the values of its placeholders."""


def missing_names(
    rows: Iterable[Row],
    marks: tuple[str, ...],
    matches: Iterable[tuple[Row, Mapping[str, str]]],
    prefix: str,
    ending: str = "",
) -> list[str]:
    """Return the missing names of a whole model.

    Args:
        rows: of its layout.
        marks: parts of names, of which the model has at least one; () for no such requirement.
        matches: rows and placeholders of the names that are there.
        prefix: value of ``{prefix}``.
        ending: end of every name.
    """
    matches = list(matches)
    seen = {(id(row), values.get("i", ""), values.get("j", "")) for row, values in matches}
    numbers: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
    chosen: dict[tuple[str, str, str], list[tuple[str, ...]]] = collections.defaultdict(list)
    for row, values in matches:
        i, j = values.get("i", ""), values.get("j", "")
        blocks, experts = stems_of(row)
        for key, number in (((blocks, ""), i), ((experts, i), j)):
            if number:
                numbers[key].add(int(number))
        chosen[row.choice, blocks, i].append(row.alternatives)
    for indices in numbers.values():
        indices |= set(gaps(indices, max(indices)))
    needed = {key: _needed(alternatives) for key, alternatives in chosen.items()}
    missing = []
    first: dict[str, set[str]] = {}
    some = {id(row) for row, values in matches if "i" in values}
    for row in rows:
        default = first.setdefault(row.choice, {*row.alternatives})
        # Optional tensors are in all blocks, or in none.
        if row.reason or row.sparse or (row.optional and id(row) not in some):
            continue
        row_placeholders = placeholders(row.theirs)
        blocks, experts = stems_of(row)
        every = sorted(numbers[blocks, ""])
        for i in map(str, every[-1:] if row.last else every) if "i" in row_placeholders else [""]:
            if row.choice and not needed.get((row.choice, blocks, i), default) & {*row.alternatives}:
                continue
            for j in map(str, sorted(numbers[experts, i]) or [0]) if "j" in row_placeholders else [""]:
                if (id(row), i, j) not in seen:
                    missing.append(fill(row.theirs, {"prefix": prefix, "i": i, "j": j}) + ending)
    if marks and not any(mark in row.theirs for row, _ in matches for mark in marks):
        missing.append(f"any {' or '.join(marks)}")
    return missing


def are_alternatives(rows: Iterable[Row]) -> bool:
    """Return whether no block has two of the rows: they belong to different alternatives of one choice."""
    rows = list(rows)
    alternatives = [one for row in rows for one in row.alternatives]
    return len({row.choice for row in rows}) == 1 and len({*alternatives}) == len(alternatives)


def by_block(several: Mapping[str, list[tuple[Row, dict[str, str]]]], matches: Matches) -> Matches:
    """Return, of names with alternative rows, those whose block has tensors of one of them, with that row.

    Args:
        several: name -> its rows and placeholders.
        matches: names with a single row.
    """
    possible: dict[tuple[str, str], set[str]] = {}
    for row, values in matches.values():
        if row.choice and "i" in values:
            key = row.choice, values["i"]
            possible[key] = possible.get(key, {*row.alternatives}) & {*row.alternatives} or {*row.alternatives}
    fitting = {
        name: [
            (row, values)
            for row, values in hits
            if possible.get((row.choice, values.get("i", "")), set()) & {*row.alternatives}
        ]
        for name, hits in several.items()
    }
    return {name: hits[0] for name, hits in fitting.items() if len(hits) == 1}


def mixed(matches: Matches) -> tuple[str, ...]:
    """Return tensors of two alternatives in one block, such as Falcon-H1's with two mixers; () if none are."""
    remaining: dict[tuple[str, str], tuple[str, set[str]]] = {}
    for name, (row, values) in matches.items():
        if row.choice and "i" in values:
            key = row.choice, values["i"]
            first, before = remaining.get(key, (name, {*row.alternatives}))
            if not before & {*row.alternatives}:
                return first, name
            remaining[key] = (name, before & {*row.alternatives})
    return ()


def _needed(rows: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the alternatives of a choice that a block must have completely, from those of each row that it has.

    Rows of one alternative decide. Without any, the alternatives that all rows share do.
    """
    rows = [*dict.fromkeys(rows)]
    alone = {row[0] for row in rows if len(row) == 1}
    shared = set(rows[0]).intersection(*rows)
    needed = alone or shared or set(itertools.chain(*rows))
    return needed.union(*(row for row in rows if not needed & {*row}))
