"""Checks blocks of a model: missing tensors by the rows of its layout, or of ours; alternatives in the same block."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from ...weights.index import stems_of
from ...weights.rows import Row
from ...weights.templates import fill, placeholders
from ..dimensions import TOGETHER

QUERY_BIAS, KEY_BIAS = "W_query.bias", "W_key.bias"
"""All modules of a checkpoint that have the first have the second, or none: Whisper's keys have no bias."""

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


def lacking(names: Iterable[str]) -> list[str]:
    """Return our names that must accompany those present but are missing: queries without keys, gaps in blocks."""
    names = set(names)
    missing = []
    for endings in TOGETHER:
        stems = {name.removesuffix(ending) for name in names for ending in endings if name.endswith(ending)}
        missing += [stem + ending for stem in stems for ending in endings if stem + ending not in names]
    # Mamba's values may have a bias; its queries are projected from the values, and have none.
    missing = [name for name in missing if name.replace(QUERY_BIAS, "W_step_up.weight") not in names]
    stems = {name.removesuffix(KEY_BIAS) for name in names if name.endswith(KEY_BIAS)}
    missing += [stem + QUERY_BIAS for stem in stems if stem + QUERY_BIAS not in names]
    if stems:
        stems = {name.removesuffix(QUERY_BIAS) for name in names if name.endswith(QUERY_BIAS)}
        missing += [stem + KEY_BIAS for stem in stems if stem + KEY_BIAS not in names]
    numbers: dict[str, set[int]] = collections.defaultdict(set)
    for name in names:
        for hit in _STACKED.finditer(name):
            numbers[name[: hit.end() - 1]].add(int(name[hit.end() :].partition(".")[0]))
    missing += _first_norms(names)
    pairs = (("stream_in.", "stream_out."), ("stream_out.", "stream_in."))
    missing += [name.replace(*pair) for name in names for pair in pairs if name.startswith(pair[0])]
    missing = [name for name in missing if name not in names]
    exempt = _exempt(names)
    missing = [name for name in dict.fromkeys(missing) if name not in exempt]
    return missing + [f"{stem}.{i}" for stem, found in numbers.items() for i in gaps(found, max(found))]


def _first_norms(names: Collection[str]) -> Iterator[str]:
    """Yield the norms before attention that blocks lack: where there are such, the first block alone may have none."""
    hits = [hit for hit in map(_SECOND_NORM.fullmatch, names) if hit is not None]
    first = {hit: f"{hit['root']}{hit['number']}.norm1.{hit['leaf']}" for hit in hits}
    roots = {(hit["root"], hit["leaf"]) for hit, name in first.items() if name in names}
    for hit, name in first.items():
        if name not in names and int(hit["number"]) and (hit["root"], hit["leaf"]) in roots:
            yield name


def _exempt(names: Collection[str]) -> set[str]:
    """Return names that attention of Gemma 3n and 4 may lack, whose blocks have a factor or alternating updates.

    In Gemma 4 keys may be values. Layers at the end of a model, and only they, may read the keys and values of earlier
    ones.
    """
    keyless: dict[str, list[int]] = collections.defaultdict(list)
    exempt = set()
    for name in names:
        hit = _MARKED.fullmatch(name)
        if hit is None:
            continue
        stem = f"{hit['root']}{hit['number']}.att."
        if hit["mark"] == "scalar" and f"{stem}W_value.weight" not in names:
            exempt |= {f"{stem}W_value.{leaf}" for leaf in ("weight", "bias") if f"{stem}W_key.{leaf}" in names}
        keyless[hit["root"]].append(int(hit["number"]))
    for root, numbers in keyless.items():
        for number in sorted(numbers, reverse=True):
            stem = f"{root}{number}.att."
            leaves = [f"{stem}{part}.{leaf}" for part in ("W_key", "W_value") for leaf in ("weight", "bias")]
            if any(name in names for name in leaves):
                break
            exempt.update(leaves, (f"{stem}k_norm.scale",))
    return exempt


_SECOND_NORM = re.compile(r"(?P<root>(?:.+\.)?trf_blocks\.)(?P<number>[0-9]+)\.norm2\.(?P<leaf>scale|shift)")

_MARKED = re.compile(r"(?P<root>(?:.+\.)?trf_blocks\.)(?P<number>[0-9]+)\.(?P<mark>scalar|altup\.corrected_scale)")
"""Parameters of the blocks of Gemma 3n and 4."""

_STACKED = re.compile(r"(?:^|(?<=\.))(?:(?:trf_blocks|heads|experts)\.(?=[0-9]+\.)|layers\.(?=[0-9]+\.att\.))")
"""Modules with numbered blocks of ours; other numbers are the user's own, and may have gaps."""


def gaps(numbers: Collection[int], stop: int) -> Iterable[int]:
    """Return the first missing numbers below `stop`; not all, since a name may have any number."""
    return itertools.islice((i for i in range(stop) if i not in numbers), 100)
