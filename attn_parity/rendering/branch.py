"""The module tree in a terminal: all of it, or the branch that leads to the first divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich.tree
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from attn_bridge.printable import listed, visible

from ..results.findings import ModuleNode, Verdict
from . import outline
from .text import NONE, growth, relative, shortened

if TYPE_CHECKING:
    from ..results.report import Report

STYLES: dict[Verdict, str] = {"equal": "green", "precision": "yellow", "different": "red", "inconclusive": "magenta"}

GUIDE = 4
"""Columns by which a level of a tree is indented."""

MAX = 9
"""Most lines of a branch."""

MAX_NAMES = 3
"""Most submodules of one reason that are named as not judged."""


# ---- the branch


def branch(report: Report, width: int) -> list[Text]:
    """Return the modules on the way to the first divergence, one line each, and how many others there are."""
    root = report.tree
    if root is None or not outline.holds_first(root):
        return []
    way = [root]
    while not way[-1].first:
        way.append(next(child for child in way[-1].children if outline.holds_first(child)))
    left = len(way) - (MAX - 1) // 2
    kept = way if left <= 0 else [way[0], *way[left + 1 :]]
    rows = []
    for depth, node in enumerate(kept):
        parent = None if depth == 0 else way[way.index(node) - 1]
        rows.append(_row(node, parent, depth, width, report))
        is_room = bool(node.children) and len(rows) + len(kept) - depth <= MAX
        room = width - 2 * (depth + 1)
        texts = [_others(node, way, report, with_reasons) for with_reasons in (True, False)] if is_room else [""]
        others = next((text for text in texts if len(text) <= room), texts[-1])
        if others:
            rows.append(Text(shortened(f"{'  ' * (depth + 1)}{others}", width), "dim"))
    title = Text("where; error of outputs (fwd) and gradients (bwd), fed the same numbers:", "bold")
    title.truncate(width, overflow="ellipsis")
    return [title, *rows[:MAX]]


def _row(node: ModuleNode, parent: ModuleNode | None, depth: int, width: int, report: Report) -> Text:
    name, kind = visible(outline.name([node], parent)), visible(outline.kind(node))
    numbers = f"fwd {relative(node.forward_error):<8} bwd {relative(node.backward_error)}"
    end = "  <- here" if node.first else ""
    room = width - 11 - len(numbers) - len(end)
    head = "  " * depth + shortened(name, max(room - 2 * depth, 8))
    head = f"{head}  {kind}"[:room] if kind else head
    return Text.assemble(
        f"{head:<{min(room, 34)}} ",
        (f"{outline.state(node, report):<9} ", STYLES[node.verdict] if node.verdict else "dim"),
        numbers,
        (end, "bold red"),
    )


def _others(node: ModuleNode, way: list[ModuleNode], report: Report, with_reasons: bool) -> str:
    """Count the other children by state; name those that were not judged, with the reason."""
    others = [child for child in node.children if not any(child is one for one in way)]
    counts: dict[str, int] = {}
    silent: dict[str, list[str]] = {}
    for child in others:
        state = "equal" if outline.entirely_equal(child) else outline.state(child, report)
        if state == outline.NOT_JUDGED:
            silent.setdefault(child.message if with_reasons else "", []).append(outline.name([child], node))
        else:
            counts[state] = counts.get(state, 0) + 1
    parts = [", ".join(f"{count} {state}" for state, count in counts.items())] * bool(counts)
    for why, names in silent.items():
        parts.append(f"{listed(names, MAX_NAMES)} {outline.NOT_JUDGED}{f' ({why})' if why else ''}")
    return f"other submodules: {'; '.join(parts)}" if parts else ""


# ---- the whole tree


def tree(report: Report, full: bool = False) -> rich.tree.Tree:
    """Return the module tree: name, class, verdict, forward and backward error, growth of the difference.

    Args:
        report: the report; if it has no tree, the result is a single line.
        full: show every module, also of long runs of equal ones.
    """
    root = report.tree
    if root is None:
        return rich.tree.Tree(Text("no module tree was looked for", style="dim"))
    collapse = not full and outline.is_large(root)
    lines: list[_Line] = []

    def grow(nodes: list[ModuleNode], parent: ModuleNode | None, depth: int) -> rich.tree.Tree:
        node = nodes[0]
        line = _Line(outline.name(nodes, parent), outline.kind(node), nodes, depth, report)
        lines.append(line)
        grown = rich.tree.Tree(line, guide_style="dim")
        if len(nodes) == 1:
            for run in outline.runs(node.children, collapse):
                grown.children.append(grow(run, node, depth + 1))
        return grown

    whole = grow([root], None, 0)
    width = max(line.width for line in lines)
    for line in lines:
        line.width = width
    return whole


class _Line:
    """One module, or a run of equal ones, in columns that align whatever the depth."""

    def __init__(self, title: str, kind: str, nodes: list[ModuleNode], depth: int, report: Report):
        self.report = report
        self.title, self.kind, self.nodes, self.depth = visible(title), visible(kind), nodes, depth
        self.width = depth * GUIDE + len(self.title) + 2 + len(self.kind)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self.title), options.max_width), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        node, several = self.nodes[0], len(self.nodes) > 1
        state = f"{len(self.nodes)} equal" if several else outline.state(node, self.report)
        style = STYLES[node.verdict] if node.verdict else "dim" if state == outline.NOT_JUDGED else "red"
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
