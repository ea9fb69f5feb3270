"""The report in a terminal, readable from 80 columns on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import rich.box
import rich.table
import rich.tree
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from ..compare.report import ModuleNode, Pair, Report, TensorVerdict, Verdict
from . import outline
from .text import NONE, growth, index, memory, number, relative, share, ulps, visible

STYLES: dict[Verdict, str] = {"equal": "green", "precision": "yellow", "different": "red", "inconclusive": "magenta"}
ROWS = 20
WIDE = 100
"""From this many columns on, the worst element has a column of its own."""

GUIDE = 4
"""Columns by which a level of a tree is indented."""

PAIRS = 12
GIVEN = ("rules", "config")
"""What settles a pairing without a proposal."""


def render(report: Report, console: Console, full: bool = False) -> None:
    """Print a report.

    Args:
        report: what `compare` found.
        console: where to.
        full: every module, tensor and pair instead of the ones that matter most.
    """
    console.print(_coloured(report.summary(), report.verdict))
    if report.first_divergence is not None:
        console.print(Text(visible(report.first_divergence), style="bold"))
    if report.tree is not None:
        console.print()
        console.print(tree(report, full))
        legend = "fwd, bwd: difference of outputs and gradients when fed the same numbers; xN: growth of the difference"
        console.print(Text(legend, style="dim"))
    if report.tensors:
        console.print()
        console.print(table(report, None if full else ROWS, wide=console.width >= WIDE))
        failures = report.failures if full else report.failures[:ROWS]
        for tensor in failures:
            console.print(_coloured(str(tensor), tensor.verdict, start=len(tensor.name) + 2))
    _print_pairing(report.pairing, console, full)
    _print_list("unexercised (no comparison reached them)", report.unexercised, console)
    _print_list("invariant (the outputs do not depend on them)", report.invariances, console)
    _print_list("not run", report.unreached, console)
    for note in report.notes:
        console.print(Text(visible(f"note: {note}")))
    if report.noise:
        noise = "; ".join(f"{name} {relative(value)}" for name, value in report.noise.items())
        console.print(Text(visible(f"noise, each side against itself: {noise}")))
    facts = [f"{name} {value}" for name, value in report.environment.items()]
    if report.peak_memory:
        facts.append(f"peak memory {memory(report.peak_memory)}")
    if facts:
        console.print(Text(visible(", ".join(facts)), style="dim"))
    if report.command:
        console.print(Text(visible(f"again: {report.command}")), soft_wrap=True)


def tree(report: Report, full: bool = False) -> rich.tree.Tree:
    """Return the module tree: name, class, verdict, forward and backward error, growth of the difference.

    Args:
        report: what `compare` found; without a tree in it, a single line says so.
        full: show every module, also of long runs of equal ones.
    """
    root = report.tree
    if root is None:
        return rich.tree.Tree(Text("no module tree was looked for", style="dim"))
    collapse = not full and outline.is_large(root)
    lines: list[_Line] = []

    def grow(nodes: list[ModuleNode], parent: ModuleNode | None, depth: int) -> rich.tree.Tree:
        node = nodes[0]
        line = _Line(outline.name(nodes, parent), outline.kind(node), nodes, depth)
        lines.append(line)
        branch = rich.tree.Tree(line, guide_style="dim")
        if len(nodes) == 1:
            for run in outline.runs(node.children, collapse):
                branch.children.append(grow(run, node, depth + 1))
        return branch

    grown = grow([root], None, 0)
    width = max(line.width for line in lines)
    for line in lines:
        line.width = width
    return grown


class _Line:
    """One module, or a run of equal ones, in columns that stand below each other whatever the depth."""

    def __init__(self, title: str, kind: str, nodes: list[ModuleNode], depth: int):
        self.title, self.kind, self.nodes, self.depth = visible(title), visible(kind), nodes, depth
        self.width = depth * GUIDE + len(self.title) + 2 + len(self.kind)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self.title), options.max_width), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        node, several = self.nodes[0], len(self.nodes) > 1
        state = f"{len(self.nodes)} equal" if several else outline.state(node)
        style = STYLES[node.verdict] if node.verdict else "dim" if state == "not run" else "red"
        numbers = [
            _labelled("fwd", relative(outline.largest(one.forward_error for one in self.nodes))),
            _labelled("bwd", relative(outline.largest(one.backward_error for one in self.nodes))),
            growth(outline.largest(one.amplification for one in self.nodes)).replace(NONE, "", 1),
        ]
        columns = Text.assemble((f" {state:<12} ", style), f"{numbers[0]:<11} {numbers[1]:<11} {numbers[2]:<6}")
        room = min(self.width - GUIDE * self.depth, options.max_width - len(columns))
        columns.rstrip()
        if len(self.title) <= room:  # verdict and numbers matter more than the end of a class
            head = f"{self.title}  {self.kind}"[:room].ljust(room)
            yield Text.assemble(head[: len(self.title)], (head[len(self.title) :], "dim"), columns)
        else:
            yield Text(self.title, overflow="fold")
            yield Text.assemble(" " * max(room, 0), columns)
        message = "" if several or (node.verdict in ("equal", None) and not node.first) else visible(node.message)
        if node.first:
            yield Text(f"<- first divergence here{': ' if message else ''}{message}", style="bold red")
        elif message:
            yield Text(message, style=style)


def _labelled(label: str, value: str) -> str:
    return "" if value == NONE else f"{label} {value}"


def table(report: Report, most: int | None = ROWS, wide: bool = True) -> rich.table.Table:
    """Return one row per tensor, failures first.

    Args:
        report: what `compare` found.
        most: largest number of rows; None for all of them.
        wide: give the worst element a column of its own, else a second line where the tensor is not equal.
    """
    found = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, caption_justify="left"
    )
    found.add_column("tensor", overflow="fold")
    found.add_column("verdict", no_wrap=True)
    found.add_column("float64\ndiff", justify="right", no_wrap=True)
    found.add_column("allowance\ntorch | flax", justify="right", no_wrap=True)
    found.add_column("ulps off\ntorch | flax", justify="right", no_wrap=True)
    if wide:
        found.add_column("worst\ntorch | flax", overflow="fold")
    failures = report.failures
    passed = [tensor for tensor in report.tensors if tensor.verdict == "equal"]
    rows = [*failures, *passed][:most]
    for tensor in rows:
        name, worst = Text(visible(tensor.name)), Text(_worst(tensor, "\n" if wide else " "))
        if not wide and tensor.verdict != "equal" and tensor.worst is not None:
            name = Text("\n").join((name, worst))
        found.add_row(
            name,
            Text(tensor.verdict, style=STYLES[tensor.verdict]),
            Text(relative(tensor.relative)),
            Text(_both(share(tensor.first_used), share(tensor.second_used))),
            Text(_both(ulps(tensor.first_ulps), ulps(tensor.second_ulps))),
            *([worst] if wide else []),
        )
    left = []
    if len(failures) > len(rows):
        left.append(f"{len(failures) - len(rows)} more not equal")
    if hidden := len(passed) - max(len(rows) - len(failures), 0):
        left.append(f"{hidden} more equal")
    if left:
        found.caption = Text(f"... and {', '.join(left)}", style="dim")
    return found


def _both(torch: str, flax: str) -> str:
    return f"{torch} | {flax}"


def _worst(tensor: TensorVerdict, between: str) -> str:
    """Write the worst element, with all digits of float32 where they matter."""
    worst = tensor.worst
    if worst is None:
        return NONE
    if tensor.verdict == "equal":
        return f"{index(worst.index)} {_both(number(worst.first, 5), number(worst.second, 5))}"
    return f"{index(worst.index)}{between}{_both(number(worst.first), number(worst.second))}"


def _coloured(line: str, verdict: Verdict, start: int = 0) -> Text:
    text = Text(visible(line))
    text.stylize(f"bold {STYLES[verdict]}", start, start + len(verdict))
    return text


def _print_list(title: str, names: Sequence[str], console: Console) -> None:
    if names:
        console.print(Text(visible(f"{title}: {'; '.join(_folded(names))}")))


def _folded(names: Iterable[str]) -> list[str]:
    """Return the names with those that differ by a number alone as one: ``h.{i}.bias (12)``."""
    counts = Counter(_numberless(name) for name in names)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_numberless(name), name)
    return [first[key] if count == 1 else f"{key} ({count})" for key, count in counts.items()]


def _numberless(name: str) -> str:
    return re.sub(r"(?<![^.\[])\d+(?![^.\]])", "{i}", name)


def _print_pairing(pairing: Sequence[Pair], console: Console, full: bool) -> None:
    """Print which parameter is which where that was proposed, pairs that differ by a number alone as one."""
    if all(pair.how in GIVEN for pair in pairing):
        return
    ways = Counter(pair.how for pair in pairing)
    console.print(f"pairing, proposed: {', '.join(f'{count} by {how}' for how, count in ways.items())}")
    if full:
        lines = Counter((pair.first, pair.second, pair.pattern, pair.how) for pair in pairing)
    else:
        lines = Counter((_numberless(p.first), _numberless(p.second), p.pattern, p.how) for p in pairing)
    shown = list(lines.items())[: None if full else PAIRS]
    grid = rich.table.Table.grid(padding=(0, 2))
    for (torch, flax, pattern, how), count in shown:
        cells = (f"{count} x" if count > 1 else "", torch, flax, pattern, how)
        grid.add_row(*(Text(visible(cell), overflow="fold") for cell in cells))
    console.print(grid)
    if len(lines) > len(shown):
        console.print(f"  ... and {len(lines) - len(shown)} more")
