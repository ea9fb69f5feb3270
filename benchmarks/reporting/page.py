"""docs/benchmarks.md: a short table of a report, its plot, and all rows behind a fold, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .report import COLUMNS, LEGEND, Report, fastest, milliseconds, times

HEAD = """# Benchmarks

Times of attention and of attention modules, ours next to the framework's own, on one machine; every result is compared
with a reference before it is timed. `x stock` above 1 means that ours is faster than the framework's own layer.
[speed.md](speed.md) has the costs of options, decoding and recurrent layers, and what limits each."""

MADE_BY = "Made by `python -m benchmarks` from what `make bench` measured; `make docs` makes this page from it again."


def markdown(report: Report, plot: str | None) -> str:
    """Return the page; `plot` is the path of the picture as seen from it."""
    frameworks = report.machine["frameworks"]
    parts = [HEAD, _table(("of", "B x T x H x D", "", *_columns(frameworks)), list(_summary(report)), 3)]
    if plot is not None:
        parts.append(f"![Time and memory over the number of tokens]({plot})")
    skipped = [f"skipped: {row.framework} {row.contender}," for row in report.rows if row.status == "skipped"]
    facts = [line for line in report.lines() if not line.startswith(tuple(skipped))]
    parts += [MADE_BY, "\n".join(f"- {line}" for line in facts)]
    parts += [f"<details><summary>All {len(report.rows)} rows</summary>", LEGEND]
    for subject in dict.fromkeys(row.subject for row in report.rows):
        lines = [
            [
                row.framework,
                row.contender + (" *" if row.picked else ""),
                row.mode,
                f"{row.group.cell} {_direction(row.group.backward)}",
                *report.numbers(row),
            ]
            for row in report.rows
            if row.subject == subject
        ]
        parts += [f"## {subject.capitalize()}", _table(("framework", "contender", "mode", "of", *COLUMNS), lines, 4)]
    return "\n\n".join([*parts, "</details>"]) + "\n"


def _columns(frameworks: Iterable[str]) -> Iterator[str]:
    for framework in frameworks:
        yield from (f"{framework}: ms", "x stock")


def _summary(report: Report) -> Iterator[list[str]]:
    """Yield a line per group: the default of each framework, and how many times as fast as its own layer it is."""
    for group, rows in report.groups():
        line = [group.subject, str(group.cell), _direction(group.backward)]
        for framework in report.machine["frameworks"]:
            ours = fastest(row for row in rows if (row.framework, row.kind, row.picked) == (framework, "ours", True))
            stock = fastest(row for row in rows if (row.framework, row.kind) == (framework, "stock"))
            ratio = stock.median / ours.median if ours and stock and ours.median and stock.median else None
            line += [milliseconds(ours.median) if ours and ours.median else "", times(ratio)]
        yield line


def _direction(backward: bool) -> str:
    return "forward and backward" if backward else "forward"


def _table(head: Iterable[str], lines: Iterable[list[str]], texts: int) -> str:
    head = list(head)
    rule = ["---"] * texts + ["--:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *_escaped(lines)))


def _escaped(lines: Iterable[list[str]]) -> list[list[str]]:
    return [[text.replace("|", "\\|").replace("*", "\\*") for text in line] for line in lines]
