"""Time and memory over the number of tokens, as one SVG that needs nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from attn_parity.rendering.html.markup import Markup, element

from ..measuring.cells import DIRECTIONS, DTYPES
from .report import Report, Row, fastest

WIDTH, HEIGHT = 400, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 34, 40
LEGEND_WIDTH = 250

COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Line = tuple[str, list[tuple[int, float]]]


def svg(report: Report) -> str:
    """Return a row of two panels, time and memory, for each subject, direction and dtype with more than one length.

    Both are per sequence, as lengths may come with different batches. Of each contender the faster mode is drawn, ours
    in full lines, the others dashed. ValueError if nothing has two lengths.
    """
    rows = [panels for panels in (_panels(report, *key) for key in _keys(report)) if panels]
    if not rows:
        raise ValueError("a plot over T needs two cells with different numbers of tokens")
    names = list(dict.fromkeys(name for _, lines, _ in rows for name, _ in lines))
    colors = dict(zip(names, itertools.cycle(COLORS), strict=False))
    marks = []
    for index, (title, times, memories) in enumerate(rows):
        y = index * HEIGHT
        marks.append(_panel(title, "ms per sequence", times, colors, 0, y))
        marks.append(_panel("", "MiB per sequence", memories, colors, WIDTH, y))
    for index, name in enumerate(names):
        y = TOP + 10 + index * 20
        x = 2 * WIDTH + 10
        marks.append(_stroke([(x, y), (x + 30, y)], colors[name], name))
        marks.append(element("text", name, x=x + 38, y=y + 4))
    width, height = 2 * WIDTH + LEGEND_WIDTH, max(len(rows) * HEIGHT, TOP + 20 * len(names) + 20)
    title = "Time and memory of attention over the number of tokens"
    drawing = element(
        "svg",
        element("title", title),
        element("rect", width=width, height=height, fill="#ffffff"),
        marks,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        font_family="sans-serif",
        font_size=12,
        fill="#222222",
    )
    return f"{drawing}\n"


def _keys(report: Report) -> list[tuple[str, str, str]]:
    keys = {(row.subject, row.direction, row.dtype) for row in report.rows}
    subjects = list(dict.fromkeys(row.subject for row in report.rows))
    return sorted(keys, key=lambda key: (subjects.index(key[0]), DIRECTIONS.index(key[1]), DTYPES.index(key[2])))


def _panels(report: Report, subject: str, direction: str, dtype: str) -> tuple[str, list[Line], list[Line]] | None:
    rows = [row for row in report.rows if (row.subject, row.direction, row.dtype) == (subject, direction, dtype)]
    if len({row.group.cell.tokens for row in rows if row.median}) < 2:
        return None
    times: list[Line] = []
    memories: list[Line] = []
    for framework, contender in dict.fromkeys((row.framework, row.contender) for row in rows):
        name = contender if contender.split(".")[0] in ("jax", "flax", "torch", "SDPA") else f"{framework} {contender}"
        best = _fastest_per_length(row for row in rows if (row.framework, row.contender) == (framework, contender))
        spent = [(tokens, (row.median or 0) * 1e3 / row.group.cell.batch) for tokens, row in best]
        points = [(tokens, row.memory_bytes / 2**20 / row.group.cell.batch) for tokens, row in best if row.memory_bytes]
        times += [(name, spent)] if spent else []
        memories += [(name, points)] if points else []
    return f"{subject}, {direction}, {dtype}", times, memories


def _fastest_per_length(rows: Iterable[Row]) -> list[tuple[int, Row]]:
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        by_length.setdefault(row.group.cell.tokens, []).append(row)
    best = ((tokens, fastest(by_length[tokens])) for tokens in sorted(by_length))
    return [(tokens, row) for tokens, row in best if row is not None]


def _panel(title: str, unit: str, lines: Sequence[Line], colors: dict[str, str], x: int, y: int) -> Markup:
    """Return one chart with logarithmic axes."""
    parts = [element("text", title, x=LEFT, y=16, font_weight="bold"), element("text", unit, x=LEFT, y=TOP - 4)]
    points = [point for _, one in lines for point in one]
    if not points:
        parts.append(element("text", "not measured", x=LEFT + 20, y=TOP + 40))
        return element("g", parts, transform=f"translate({x},{y})")
    lengths = sorted({tokens for tokens, _ in points})
    low = math.floor(math.log10(min(value for _, value in points)))
    high = max(math.ceil(math.log10(max(value for _, value in points))), low + 1)
    span = math.log2(lengths[-1] / lengths[0]) or 1.0

    def place(tokens: int, value: float) -> tuple[float, float]:
        across = math.log2(tokens / lengths[0]) / span
        up = (math.log10(value) - low) / (high - low)
        return LEFT + 8 + across * (WIDTH - LEFT - RIGHT - 16), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    for power in range(low, high + 1):
        _, line_y = place(lengths[0], 10.0**power)
        label = f"{10**power}" if 0 <= power <= 4 else f"10{str(power).translate(_SUPERSCRIPTS)}"
        parts.append(_rule(LEFT, line_y, WIDTH - RIGHT, line_y))
        parts.append(element("text", label, x=LEFT - 6, y=f"{line_y + 4:.1f}", text_anchor="end"))
    for tokens in lengths:
        line_x, bottom = place(tokens, 10.0**low)
        parts.append(_rule(line_x, TOP, line_x, bottom))
        parts.append(element("text", f"{tokens}", x=f"{line_x:.1f}", y=f"{bottom + 16:.1f}", text_anchor="middle"))
    parts.append(element("text", "T", x=WIDTH - RIGHT, y=HEIGHT - BOTTOM + 30, text_anchor="end"))
    for name, line in lines:
        parts.append(_stroke([place(*point) for point in line], colors[name], name))
        parts += [
            element("circle", cx=f"{cx:.1f}", cy=f"{cy:.1f}", r=3, fill=colors[name])
            for cx, cy in (place(*point) for point in line)
        ]
    return element("g", parts, transform=f"translate({x},{y})")


def _stroke(points: Sequence[tuple[float, float]], color: str, name: str) -> Markup:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = None if "ours" in name else "5 3"
    return element("polyline", points=path, fill="none", stroke=color, stroke_width=2, stroke_dasharray=dashes)


def _rule(x1: float, y1: float, x2: float, y2: float) -> Markup:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return element("line", stroke="#dddddd", **ends)
