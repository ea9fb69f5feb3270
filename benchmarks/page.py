"""docs/benchmarks.md: the full tables of a report, and its plot, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from .report import COLUMNS, LEGEND, Report, heading


def markdown(report: Report, plot: str | None) -> str:
    """Return the page; `plot` is the path of the picture as seen from it."""
    parts = [
        "# Benchmarks",
        "Made by `python -m benchmarks` from what `make bench` measured; `make docs` makes it again.",
        "\n".join(f"- {line}" for line in report.lines()),
        LEGEND,
    ]
    if plot is not None:
        parts.append(f"![Time and memory over the number of tokens]({plot})")
    subject = None
    for group, rows in report.groups():
        if group.subject != subject:
            subject = group.subject
            parts.append(f"## {subject.capitalize()}")
        parts.append(f"### {heading(group, rows)}")
        lines = [
            [row.framework, row.contender + (" *" if row.picked else ""), row.mode, *report.numbers(row)]
            for row in rows
        ]
        parts.append(_table(("framework", "contender", "mode", *COLUMNS), lines))
    return "\n\n".join(parts) + "\n"


def _table(head: Iterable[str], lines: Iterable[list[str]]) -> str:
    head = list(head)
    rule = ["---"] * 3 + ["--:"] * (len(head) - 3)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *_escaped(lines)))


def _escaped(lines: Iterable[list[str]]) -> list[list[str]]:
    return [[text.replace("|", "\\|").replace("*", "\\*") for text in line] for line in lines]
