"""The report in a terminal: in a screen, or with `full` everything that is known."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import rich.box
import rich.table
import rich.tree
from rich.console import Console
from rich.text import Text

from attn_bridge.printable import visible

from ..results.findings import TensorVerdict, Verdict, shown
from . import outline
from .branch import STYLES, branch, tree
from .text import (
    LEGEND,
    closest,
    folded,
    measured,
    memory,
    not_given,
    one_line,
    relative,
    share,
    shortened,
    telling_notes,
    ulps,
    used,
    where,
)

if TYPE_CHECKING:
    from ..results.report import Report

WIDTH = 80
"""Columns of a report that goes to no terminal: a file, a pipe, or ``print(report)``."""

MAX_LINES: dict[bool, int] = {True: 25, False: 45}
"""Passed -> most lines of a report that is not full, in 80 columns."""

TOP = 11
"""Most lines of the summary, the place and the hint, which has 3 at least: its alternatives must be read whole."""

CLOSEST = 3
"""Number of tensors of an equal pair to show: those that came closest to their allowance."""

FEWEST, MAX = 2, 8
"""How many tensors that are not equal are shown, if that many are not."""

NAMES = 4
"""How many arguments that were not given are named of a side."""

BESIDE = 40
"""Most characters in the column next to a tensor's name; longer values get a line below."""

MORE = 2
"""How many lines more than it has to a text may take where there is room."""

ENOUGH: dict[bool, int] = {True: 10, False: 20}
"""Passed -> lines for tensors and notes, which other texts take no more than they have to of."""

ALLOWED = 4
"""Number of allowances with a separate line."""

Lines = list[Text]


def as_text(report: Report, width: int = WIDTH) -> str:
    """Return the text that `render` prints to a file: without colour, in lines of this width, but for the command."""
    out = io.StringIO()
    # In Jupyter, a console would show its lines beside the file, as HTML, and leave the file empty.
    console = Console(
        file=out, width=width, highlight=False, color_system=None, force_terminal=False, force_jupyter=False
    )
    render(report, console)
    return out.getvalue().rstrip("\n")


def render(report: Report, console: Console, full: bool = False) -> None:
    """Print a report.

    Args:
        report: what `compare` found.
        console: where to.
        full: every module, tensor, pair and note, the noise and the environment, instead of what matters most.
    """
    if full:
        _render_full(report, console)
        return
    page = _Page(report, console)
    for line in page.lines():
        console.print(line)
    if report.command:
        console.print(Text(visible(f"again: {one_line(report.command)}")), soft_wrap=True)


class _Page:
    """The short report, section by section; the tensors get the room that the other sections leave."""

    def __init__(self, report: Report, console: Console):
        self.report, self.console = report, console
        self.width = console.width

    def lines(self) -> Lines:
        report = self.report
        top = self._top()
        way = branch(report, self.width) if report.first_divergence is not None and report.tree is not None else []
        whole = MAX_LINES[report.passed] - len(top) - len(way) - bool(way) - 2
        below, room = Lines(), whole
        for more in range(MORE, -1, -1):
            below = [*self._coverage(1 + more), *self._allowed(1 + more), *self._changes(2 + more)]
            room = whole - len(below)
            if room >= ENOUGH[report.passed]:
                break
        notes, left = self._notes(most=max(2, min(6, room - 2 * FEWEST - 3)))
        tensors = self._tensors(room - len(notes))
        return [*top, *tensors, *([Text()] if way else []), *way, *below, *notes, *self._more(left)]

    def _top(self) -> Lines:
        report, first = self.report, self.report.first_divergence
        most = (3 if report.message else 2) if report.tensors or report.passed else 8
        lines = self._wrapped(coloured(one_line(report.summary()), report.verdict), most)
        if first is not None:
            inside = "" if first.between is not None else "in "
            lines += self._wrapped(Text(f"first divergence ({first.direction}) {inside}{first.place}", "bold"), 2)
            lines += self._wrapped(Text(f"  {first.message}"), 3) if first.message else []
            lines += self._wrapped(Text(f"not excluded: {first.others}"), 2) if first.others else []
            rest = max(3, TOP - len(lines))
            lines += self._wrapped(Text(f"hint: {first.hint}", "bold"), rest) if first.hint else []
        return lines

    def _tensors(self, room: int) -> Lines:
        report = self.report
        failures = report.failures
        if not failures:
            return self._closest()
        page_lines = [Text(), Text(f"{len(failures)} of {len(report.tensors)} tensors are not equal:", "bold")]
        rows = 0
        for lines in self._rows(failures[:MAX]):
            spare = room - len(page_lines) - 1 - 2 * max(FEWEST - rows - 1, 0)
            if len(lines) > spare and rows >= FEWEST:
                break
            if len(lines) > spare:
                lines = [lines[0], self._ended(lines[1])]
            page_lines += lines
            rows += 1
        left = len(report.tensors) - rows
        if left:
            more, equal = len(failures) - rows, sum(one.verdict == "equal" for one in report.tensors)
            parts = [f"{more} more not equal"] * bool(more) + [f"{equal} equal"] * bool(equal)
            page_lines.append(Text(f"... and {', '.join(parts)}", "dim"))
        return page_lines

    def _rows(self, tensors: list[TensorVerdict]) -> Iterator[Lines]:
        """Yield the lines of each tensor: its name, verdict and number, then longer values, and the worst element."""
        values = [visible(measured(one, self.report)) for one in tensors]
        space = max(len(value) if len(value) <= BESIDE else 0 for value in values)
        verdict = max(len(one.verdict) for one in tensors)
        name = max(12, min(self.width - space - verdict - 4, max(len(visible(one.name)) for one in tensors)))
        for tensor, value in zip(tensors, values, strict=True):
            head = f"{shortened(visible(tensor.name), name):<{name}}  "
            beside = f"  {value}" if len(value) <= BESIDE else ""
            line = Text.assemble(
                head, (f"{tensor.verdict:<{verdict}}" if beside else tensor.verdict, STYLES[tensor.verdict])
            )
            line.append(beside)
            line.truncate(self.width, overflow="ellipsis")
            below = [] if beside else self._wrapped(Text(f"  {value}"), 2)
            yield [line, *below, *self._place(where(tensor, self.report))]

    def _place(self, text: str) -> Lines:
        """Return the worst element in one line, or the sample that it is of in another."""
        if len(text) + 2 <= self.width or ", on " not in text:
            return self._wrapped(Text(f"  {text}", "dim"), 1) if text else []
        values, _, sample = text.rpartition(", on ")
        return [*self._wrapped(Text(f"  {values},", "dim"), 1), *self._wrapped(Text(f"    on {sample}", "dim"), 1)]

    def _closest(self) -> Lines:
        """Show what came closest to its limit; a reader sees how much room there was."""
        rows = closest(self.report)[:CLOSEST]
        if not rows:
            return []
        space = max(len(one.on) for one in rows)
        name = max(12, min(self.width - space - 10, max(len(visible(one.name)) for one in rows)))
        lines = self._wrapped(Text(f"{LEGEND}:"), 1)
        for row in rows:
            lines.append(Text(f"  {shortened(visible(row.name), name):<{name}}  {share(row.used):>4}  {row.on}"))
            lines[-1].truncate(self.width, overflow="ellipsis")
        return lines

    def _coverage(self, most: int) -> Lines:
        report, lines = self.report, []
        for title, names in (
            ("reached by no comparison", report.unexercised),
            ("the outputs do not depend on", report.invariances),
            ("not covered", not_given(report.unreached, NAMES)),
        ):
            lines += self._listed(title, folded(names), most) if names else []
        return lines

    def _listed(self, title: str, items: list[str], most: int) -> Lines:
        """Return the items that fit into at most this many lines, and the count of the others."""
        fitting: Lines = []
        for count in range(1, len(items) + 1):
            left = len(items) - count
            text = f"{title}: {'; '.join(items[:count])}{f'; and {left} more' if left else ''}"
            lines = self._wrapped(Text(text), most + 1)
            if len(lines) <= most:
                fitting = lines
            elif left != 1:  # the last item may be shorter than the words for it
                break
        return fitting or self._wrapped(Text(f"{title}: {'; '.join(items)}"), most)

    def _allowed(self, most: int) -> Lines:
        allowed = self.report.allowed
        lines = [line for one in allowed[:ALLOWED] for line in self._wrapped(Text(str(one), "bold"), most)]
        if len(allowed) > ALLOWED:
            rest = "; ".join(f"{one.path}: {one.reason}" for one in allowed[ALLOWED:])
            lines += self._wrapped(Text(f"allowed, {len(allowed) - ALLOWED} more: {rest}", "bold"), 2)
        return lines

    def _changes(self, most: int) -> Lines:
        changes = self.report.changes
        return [] if changes is None else [one for line in changes.lines() for one in self._wrapped(Text(line), most)]

    def _notes(self, most: int) -> tuple[Lines, int]:
        """Return the notes without repetitions, as many as fit in whole, and the number of those left out."""
        shown_lines: Lines = []
        notes = telling_notes(self.report)
        for position, note in enumerate(notes):
            lines = self._wrapped(Text(f"note: {one_line(note)}"), most)
            if len(shown_lines) + len(lines) > most:
                return shown_lines, len(notes) - position
            shown_lines += lines
        return shown_lines, 0

    def _more(self, notes: int) -> Lines:
        report = self.report
        facts = [f"{notes} more note{'s' if notes > 1 else ''}"] * bool(notes)
        facts += ["every tensor"] * (len(report.tensors) > CLOSEST)
        facts += ["modules"] * (report.tree is not None) + ["pairing"] * bool(report.pairing)
        facts += ["noise"] * bool(report.noise) + ["environment"] * bool(report.environment)
        return self._wrapped(Text(f"--full shows {', '.join(facts)}", "dim"), 1) if facts else []

    def _wrapped(self, text: Text, most: int) -> Lines:
        """Wrap a text into at most this many lines, with an ellipsis in the last one if it does not fit."""
        plain = one_line(text.plain)
        spaces = len(text.plain) - len(text.plain.lstrip(" "))
        text = Text(" " * spaces + visible(plain), text.style, spans=list(text.spans))
        lines = list(text.wrap(self.console, self.width, overflow="fold"))
        if len(lines) > most:
            lines[most - 1] = self._ended(lines[most - 1])
        for line in lines[:most]:
            line.rstrip()
        return lines[:most]

    def _ended(self, line: Text) -> Text:
        """Return a line with an ellipsis behind its last whole word."""
        line = line.copy()
        line.rstrip()
        at = line.plain.rfind(" ", self.width // 2)
        if line.cell_len > self.width - 2 and at > 0:
            line = line[:at]
        line.truncate(self.width - 2)
        line = line[: len(line.plain.rstrip(" ,;:("))]
        line.append(" …")
        return line


def coloured(line: str, verdict: Verdict, start: int = 0) -> Text:
    """Return a line with its verdict, which begins at `start`, in its colour."""
    text = Text(visible(line))
    text.stylize(f"bold {STYLES[verdict]}", start, start + len(verdict))
    return text


# ---- everything


def _render_full(report: Report, console: Console) -> None:
    console.print(coloured(report.summary(), report.verdict))
    first = report.first_divergence
    if first is not None:
        console.print(Text(visible(first), style="bold"))
        if first.hint:
            console.print(Text(visible(f"hint: {first.hint}"), style="bold"))
    if report.tree is not None:
        console.print()
        console.print(tree(report, full=True))
        legend = "fwd, bwd: difference of outputs and gradients when fed the same numbers; xN: growth of the difference"
        console.print(Text(legend, style="dim"))
    if report.tensors:
        console.print()
        console.print(table(report))
        for tensor in report.failures:
            console.print(coloured(str(tensor), tensor.verdict, start=len(tensor.name) + 2))
    for line in _facts(report):
        console.print(Text(visible(line)))
    _print_pairing(report, console)
    if report.command:
        console.print(Text(visible(f"again: {report.command}")), soft_wrap=True)


def _facts(report: Report) -> Iterator[str]:
    """Yield the remaining facts, a line for each."""
    for title, names in (
        ("unexercised (no comparison reached them)", report.unexercised),
        ("invariant (the outputs do not depend on them)", report.invariances),
        ("not covered", not_given(report.unreached)),
    ):
        if names:
            yield f"{title}: {'; '.join(folded(names))}"
    yield from map(str, report.allowed)
    yield from report.changes.lines() if report.changes is not None else ()
    yield from (f"note: {note}" for note in report.notes)
    if report.noise:
        noise = "; ".join(f"{name} {relative(value)}" for name, value in report.noise.items())
        yield f"noise, each side against itself, relative: {noise}"
    facts = [f"{name} {value}" for name, value in report.environment.items()]
    if report.peak_memory:
        facts.append(f"peak memory {memory(report.peak_memory)}")
    if facts:
        yield ", ".join(facts)


def table(report: Report) -> rich.table.Table:
    """Return one row per tensor, failures first, with all that was measured."""
    grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    labels = f"{shown(report.first_label)} | {shown(report.second_label)}"
    grid.add_column("tensor", overflow="fold")
    grid.add_column("verdict", no_wrap=True)
    grid.add_column("float64 diff,\nrelative", justify="right", no_wrap=True)
    grid.add_column("error, % of\nwhat is allowed", justify="right", no_wrap=True)
    grid.add_column(f"ulps off\n{labels}", justify="right", no_wrap=True)
    allowed = [one for one in report.tensors if one.allowed]
    passed = [one for one in report.tensors if one.verdict == "equal" and not one.allowed]
    for tensor in (*report.failures, *allowed, *passed):
        lines = [visible(tensor.name), *([f"allowed: {tensor.allowed}"] if tensor.allowed else [])]
        if tensor.worst is not None:
            lines.append(where(tensor, report))
        grid.add_row(
            Text(visible("\n".join(lines))),
            Text(tensor.verdict, style=STYLES[tensor.verdict]),
            Text(relative(tensor.relative)),
            Text(share(used(tensor, report))),
            Text(f"{ulps(tensor.first_ulps)} | {ulps(tensor.second_ulps)}"),
        )
    return grid


def _print_pairing(report: Report, console: Console) -> None:
    if not report.pairing:
        return
    console.print(f"pairing of parameters: {outline.ways(report.pairing)}")
    grid = rich.table.Table.grid(padding=(0, 2))
    for pair in report.pairing:
        cells = (pair.first, pair.second, pair.pattern, pair.how)
        grid.add_row(*(Text(visible(cell), overflow="fold") for cell in cells))
    console.print(grid)
