"""The module tree as a reader wants it: short names, and long runs of equal siblings as one line."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..results.findings import ModuleNode, PairedParameter, shown

if TYPE_CHECKING:
    from ..results.report import Report

LARGE = 24
"""From this many modules on, runs of equal siblings are one line."""

RUN = 3
"""The shortest run that is."""


NOT_JUDGED = "not judged"
"""State of a submodule that was not run alone on both sides."""


def is_large(root: ModuleNode) -> bool:
    """Whether a tree has too many modules to show each."""
    return sum(1 for _ in itertools.islice(root.walk(), LARGE)) == LARGE


def entirely_equal(node: ModuleNode) -> bool:
    """Whether all of a module that was run is equal, some of it was run, and all of it has a counterpart."""
    verdicts = {part.verdict for part in node.walk()}
    paired = all(part.path is not None and part.second_path is not None for part in node.walk())
    return paired and "equal" in verdicts and verdicts <= {"equal", None} and not holds_first(node)


def holds_first(node: ModuleNode) -> bool:
    """Whether the first divergence is in a module or below it."""
    return any(part.first for part in node.walk())


def runs(children: Sequence[ModuleNode], collapse: bool) -> Iterator[list[ModuleNode]]:
    """Yield the children one by one, but entirely equal neighbours of one class together if `collapse`."""
    for kind, group in itertools.groupby(
        children, key=lambda node: (node.first_type, node.second_type) if collapse and entirely_equal(node) else None
    ):
        nodes = list(group)
        if kind is not None and len(nodes) >= RUN:
            yield nodes
        else:
            yield from ([node] for node in nodes)


def name(nodes: Sequence[ModuleNode], parent: ModuleNode | None) -> str:
    """Return a module's name below its parent, or of a run of siblings ``h.0 ... h.11``; of the root, its class."""
    ends = [nodes[0], nodes[-1]] if len(nodes) > 1 else nodes
    names = [_below(one.path, parent.path if parent else None) or second_name(one, parent) for one in ends]
    return " ... ".join(names) or _classes(nodes[0]) or "module"


def second_name(node: ModuleNode, parent: ModuleNode | None) -> str:
    """Return a module's name on the second side below its parent, "" if it has none."""
    return _below(node.second_path, parent.second_path if parent else None)


def _below(path: str | None, above: str | None) -> str:
    return (path or "").removeprefix(f"{above}." if above else "")


def kind(node: ModuleNode) -> str:
    """Return a module's class, both where they differ; of the root nothing, for its class is its name."""
    return "" if node.path == "" else _classes(node)


def _classes(node: ModuleNode) -> str:
    return " | ".join(dict.fromkeys(one for one in (node.first_type, node.second_type) if one))


def state(node: ModuleNode, report: Report | None = None) -> str:
    """Return the verdict, or the words for having none."""
    labels = ("torch", "flax") if report is None else (report.first_label, report.second_label)
    if node.second_path is None:
        return f"{shown(labels[0])} only"
    if node.path is None:
        return f"{shown(labels[1])} only"
    return node.verdict or NOT_JUDGED


def ways(pairing: Sequence[PairedParameter]) -> str:
    """Return how many parameters were paired in which way."""
    counts = Counter(pair.how for pair in pairing)
    return ", ".join(f"{count:,} by {how}" for how, count in counts.items())


def largest(values: Iterator[float | None]) -> float | None:
    """Return the largest of some errors; None if all are None."""
    return max((value for value in values if value is not None), default=None)
