"""Small charts of the pages, as SVG with words for who can't see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..text import number
from .markup import Markup, element

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 240, 64, 30
POINTS = 400
"""Most points of a line; of more, every n-th is drawn, and always the last."""

DECADES = 3.0
"""Powers of ten that the values span from which on an axis is logarithmic."""


def lines(series: Mapping[str, tuple[str, Sequence[float]]], words: str) -> Markup:
    """Return lines over the steps 1, 2, ...

    Args:
        series: name -> class of the line, and its values; a non-finite value leaves a gap.
        words: caption of the chart.
    """
    finite = [one for _, values in series.values() for one in values if math.isfinite(one)]
    steps = max((len(values) for _, values in series.values()), default=0)
    positive = [one for one in finite if one > 0]
    is_log = bool(positive) and math.log10(max(positive) / min(positive)) >= DECADES
    scaled = [math.log10(one) for one in positive] if is_log else finite
    low, high = (min(scaled), max(scaled)) if scaled else (0.0, 1.0)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 8) * ((step - 1) / (steps - 1) if steps > 1 else 0.5)

    def y(value: float) -> float:
        at = math.log10(value) if is_log and value > 0 else low if is_log else value
        return 8 + (HEIGHT - BOTTOM - 8) * (high - at) / (high - low)

    marks = []
    for part in range(5):
        at = low + (high - low) * part / 4
        height = round(8 + (HEIGHT - BOTTOM - 8) * (high - at) / (high - low), 1)
        marks.append(element("line", x1=LEFT, x2=WIDTH - 8, y1=height, y2=height, class_="tick"))
        label = number(10**at if is_log else at, 3)
        marks.append(element("text", label, x=LEFT - 6, y=height + 4, text_anchor="end"))
    for step in sorted({1, (steps + 1) // 2, steps} - {0}):
        marks.append(element("text", str(step), x=round(x(step), 1), y=HEIGHT - BOTTOM + 16, text_anchor="middle"))
    marks.append(element("text", "step", x=WIDTH - 8, y=HEIGHT - 2, text_anchor="end"))
    for kind, values in series.values():
        for run in _runs(values):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)
            if len(run) == 1:
                marks.append(element("circle", cx=points.split(",")[0], cy=points.split(",")[1], r=3, class_=kind))
            else:
                marks.append(element("polyline", points=points, class_=f"line {kind}"))
    legend = element(
        "div", (element("span", name, class_=f"series {kind}") for name, (kind, _) in series.items()), class_="legend"
    )
    picture = element(
        "svg", element("title", words), marks, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=words
    )
    scale = element("figcaption", "The scale is logarithmic." if is_log else "The scale is linear.")
    return element("figure", picture, legend, scale, class_="chart")


def _runs(values: Sequence[float]) -> list[list[tuple[int, float]]]:
    """Return the points that are drawn, in pieces without a gap."""
    every = max(1, math.ceil(len(values) / POINTS))
    pieces: list[list[tuple[int, float]]] = [[]]
    for position, value in enumerate(values):
        if not math.isfinite(value):
            pieces.append([])
        elif position % every == 0 or position == len(values) - 1:
            pieces[-1].append((position + 1, value))
    return [one for one in pieces if one]


def bars(counts: Sequence[int], words: str, width: int = 160, height: int = 36) -> Markup:
    """Return a small histogram."""
    most = max([*counts, 1])
    step = width / max(len(counts), 1)
    marks = [
        element(
            "rect",
            x=f"{place * step:.1f}",
            y=f"{height - max(1.0, count / most * height):.1f}",
            width=f"{max(step - 0.5, 0.5):.1f}",
            height=f"{max(1.0, count / most * height):.1f}",
            class_="bar",
        )
        for place, count in enumerate(counts)
        if count
    ]
    return element(
        "svg", element("title", words), marks, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img",
        aria_label=words, class_="bars",
    )  # fmt: skip
