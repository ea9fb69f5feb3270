"""Figures of the HTML page: heat maps of both sides and their difference, and histograms of their rounding errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...results.findings import Array, Picture, TensorVerdict, shown
from ..text import index, number, relative, shape, ulps
from . import pictures
from .markup import Markup, badge, element, hint, named, scrolled

if TYPE_CHECKING:
    from ...results.report import Report

MAX = 24
"""Most tensors that are drawn; those that differ come first."""

OPEN = 3
"""How many of them are unfolded."""

MAP_SIZE, HEAD_SIZE = 256, 84
CHART_WIDTH, CHART_HEIGHT = 340, 190
SideLabels = tuple[str, str]
"""Names of the two sides."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def section(report: Report) -> list[Markup]:
    """Return the body of the section on pictures, most telling first."""
    verdicts = {tensor.name: tensor for tensor in report.tensors}
    places = {tensor.name: place for place, tensor in enumerate(report.failures)}
    ordered = sorted(report.pictures, key=lambda picture: places.get(picture.name, len(places)))[:MAX]
    labels = shown(report.first_label), shown(report.second_label)
    parts = []
    if len(report.pictures) > len(ordered):
        count = f"{len(ordered)} of {len(report.pictures):,} tensors, those that differ first."
        parts.append(hint(count))
    for rank, picture in enumerate(ordered):
        tensor = verdicts.get(picture.name)
        verdict = tensor.verdict if tensor else "equal"
        parts.append(
            element(
                "details",
                element(
                    "summary",
                    named(picture.name),
                    badge(verdict) if tensor else None,
                    element("span", shape(picture.first.shape), class_="hint"),
                ),
                element("div", _maps(picture, labels), _histogram(picture, tensor, labels), class_="figures"),
                open=rank < OPEN,
                class_="picture",
            )
        )
    return parts


# ---- heat maps


def _maps(picture: Picture, labels: SideLabels) -> Markup:
    first, second = picture.first, picture.second
    if not first.size or first.shape != second.shape:
        why = "it has no elements"
        if first.size:
            why = f"{labels[0]} has {shape(first.shape)}, {labels[1]} {shape(second.shape)}"
        return hint(f"Not drawn: {why}.")
    if pictures.is_attention(first) or pictures.is_attention(second):
        return _head_maps(picture, labels)
    matrices = pictures.matrix(first), pictures.matrix(second)
    rows, columns = matrices[0].shape
    caption = f"{rows} x {columns} elements: {pictures.axes_of(first.shape)}"
    if max(rows, columns) > pictures.CELLS:
        caption += f", drawn as at most {pictures.CELLS} x {pictures.CELLS} cells, each the most extreme of its block"
    flat_index = np.ravel_multi_index(pictures.furthest(*matrices), matrices[0].shape)
    caption += _largest(first, second, np.unravel_index(int(flat_index), first.shape), labels)
    return _figure(picture.name, [(None, *matrices)], MAP_SIZE, caption, labels)


def _head_maps(picture: Picture, labels: SideLabels) -> Markup:
    """Return one small map per head of one sample of attention weights ``(B, H, T, S)``."""
    batch, heads, queries, keys = picture.first.shape
    sample, chosen = pictures.chosen_heads(picture.first, picture.second)
    maps = [(f"head {head}", picture.first[sample, head], picture.second[sample, head]) for head in sorted(chosen)]
    caption = f"attention weights, {queries} queries (down) x {keys} keys (across), sample {sample} of {batch}"
    if heads > len(chosen):
        caption += f", the {len(chosen)} of {heads} heads that differ most"
    position = pictures.furthest(picture.first[sample, chosen[0]], picture.second[sample, chosen[0]])
    caption += _largest(picture.first, picture.second, (sample, chosen[0], *position), labels)
    return _figure(picture.name, maps, HEAD_SIZE, caption, labels)


def _largest(first: Array, second: Array, position: Sequence[Any], labels: SideLabels) -> str:
    ours, theirs = float(first[tuple(position)]), float(second[tuple(position)])
    if ours == theirs or (ours != ours and theirs != theirs):
        return ""
    return f"; largest difference at {index(tuple(position))}: {labels[0]} {number(ours)}, {labels[1]} {number(theirs)}"


def _figure(
    name: str, maps: Sequence[tuple[str | None, Array, Array]], size: int, caption: str, labels: SideLabels
) -> Markup:
    """Return a table of pictures: a column per map, a row per side, and one of differences, with two scales."""
    first = [pictures.shrink(one) for _, one, _ in maps]
    second = [pictures.shrink(two) for _, _, two in maps]
    apart = [pictures.shrink(one, two) for _, one, two in maps]
    low, high = pictures.limits(*first, *second)
    largest = max(abs(limit) for limit in pictures.limits(*apart))
    minus = f"{labels[0]} - {labels[1]}"
    sides = [
        (labels[0], first, low, high, False),
        (labels[1], second, low, high, False),
        (minus, apart, -largest, largest, True),
    ]
    table = _table_of_maps(name, maps, sides, size)
    not_finite = any(not np.isfinite(cells).all() for cells in (*first, *second, *apart))
    extent = max(abs(low), abs(high))
    scales = element(
        "div",
        _scale("values", number(low, 4), number(high, 4), diverging=False),
        _scale(minus, number(-largest, 3), number(largest, 3), diverging=True)
        if largest
        else element("span", "no difference in any bit" if not not_finite else "no finite difference"),
        element("span", f"the largest difference is {relative(largest / extent)} of the largest value")
        if largest and extent
        else None,
        element("span", element("span", class_="swatch"), "not finite") if not_finite else None,
        class_="scales",
    )
    region = scrolled(table, f"pictures of {name}", "scroll")
    return element("figure", region, scales, element("figcaption", caption))


def _table_of_maps(
    name: str,
    maps: Sequence[tuple[str | None, Array, Array]],
    sides: Sequence[tuple[str, list[Array], float, float, bool]],
    size: int,
) -> Markup:
    cells = [
        [
            _image(one, low, high, diverging, size, f"{label} of {name}" + (f", {head}" if head else ""))
            for (head, _, _), one in zip(maps, side, strict=True)
        ]
        for label, side, low, high, diverging in sides
    ]
    wide = maps[0][0] is None  # a single map: the sides stand next to each other
    if wide:
        head = element("tr", (element("th", label, scope="col") for label, *_ in sides))
        body = element("tr", (element("td", row[0]) for row in cells))
    else:
        head = element("tr", element("td"), (element("th", title, scope="col") for title, _, _ in maps))
        body = Markup(
            "".join(
                element("tr", element("th", label, scope="row"), (element("td", image) for image in row))
                for (label, *_), row in zip(sides, cells, strict=True)
            )
        )
    return element("table", element("thead", head), element("tbody", body), class_="maps wide" if wide else "maps")


def _image(cells: Array, low: float, high: float, diverging: bool, size: int, what: str) -> Markup:
    rows, columns = cells.shape
    smallest, largest = pictures.limits(cells)
    alt = f"{what}: from {number(smallest, 4)} to {number(largest, 4)}"
    if broken := int((~np.isfinite(cells)).sum()):
        alt += f", {broken} cells not finite"
    width = columns * max(1, size // max(rows, columns))  # whole pixels, so that all cells are of one size
    return element("img", src=pictures.heat_map(cells, low, high, diverging=diverging), alt=alt, width=width)


def _scale(title: str, low: str, high: str, *, diverging: bool) -> Markup:
    bar = element("img", src=pictures.scale_bar(diverging=diverging), alt="to", class_="bar-image")
    return element(
        "span", f"{title} ", element("span", low, class_="number"), bar, element("span", high, class_="number")
    )


# ---- histograms


def _histogram(picture: Picture, tensor: TensorVerdict | None, labels: SideLabels) -> Markup | None:
    """Return one side's errors as bars upwards and the other's as bars downwards, over their size in octaves."""
    oracle = picture.oracle
    if oracle is None:
        return hint("No float64 result to measure the rounding errors of both sides against.")
    if not oracle.size or not picture.first.shape == picture.second.shape == oracle.shape:
        return None
    atom = pictures.unit(tensor.dtype if tensor else str(picture.first.dtype), oracle)
    if atom is None:
        return None
    first, first_rms, first_max = pictures.error_histogram(picture.first, oracle, atom)
    second, second_rms, second_max = pictures.error_histogram(picture.second, oracle, atom)
    used = np.flatnonzero(first + second)
    last = max(int(used[-1]), 1 - pictures.octave(0))  # one unit is always on the axis
    texts = [
        f"{labels[0]}: rms {ulps(first_rms)}, largest {ulps(first_max)}",
        f"{labels[1]}: rms {ulps(second_rms)}, largest {ulps(second_max)}",
    ]
    title = f"errors of {picture.name} in units of the last place. {texts[0]}. {texts[1]}."
    return element(
        "figure",
        _chart(first[: last + 1], second[: last + 1], title, labels),
        element(
            "figcaption",
            f"Across: error against float64, in units of the last place (ulp) of the largest value; 1 ulp is "
            f"{number(atom, 3)}. Up and down: share of the tensor's {oracle.size:,} elements, which are 100 %. ",
            (
                element("span", text, class_=f"series side-{side}")
                for side, text in zip(("first", "second"), texts, strict=True)
            ),
        ),
        class_="histogram",
    )


def _chart(first: Array, second: Array, title: str, labels: SideLabels) -> Markup:
    bins = len(first)
    left, bottom = 54, 36
    step = (CHART_WIDTH - left - 6) / bins
    middle = (CHART_HEIGHT - bottom) / 2
    highest = max(int(first.max()), int(second.max()), 1)
    share = highest / max(int(first.sum()), 1)
    marks = []
    for side, counts, up in (("first", first, True), ("second", second, False)):
        for bin_index in np.flatnonzero(counts).tolist():
            height = max(1.5, float(counts[bin_index]) / highest * (middle - 6))  # a single outlier stays visible
            marks.append(
                element(
                    "rect",
                    x=f"{left + bin_index * step + 0.5:.1f}",
                    y=f"{middle - height - 0.5 if up else middle + 0.5:.1f}",
                    width=f"{max(step - 1, 1):.1f}",
                    height=f"{height:.1f}",
                    class_=f"side-{side}",
                )
            )
    for bin_index in range(0, bins, 4):
        x = f"{left + bin_index * step:.1f}"
        power = pictures.octave(bin_index)
        label = "<2⁻⁷" if not bin_index else "1" if not power else f"2{str(power).translate(_SUPERSCRIPTS)}"
        marks.append(element("line", x1=x, x2=x, y1=0, y2=CHART_HEIGHT - bottom + 3, class_="tick"))
        marks.append(element("text", label, x=x, y=CHART_HEIGHT - bottom + 16, text_anchor="middle"))
    marks.append(element("line", x1=left, x2=CHART_WIDTH, y1=f"{middle:.1f}", y2=f"{middle:.1f}", class_="axis"))
    for label, y in ((labels[0], middle / 2 + 6), (labels[1], middle * 1.5)):
        marks.append(element("text", label, x=left - 8, y=f"{y + 4:.1f}", text_anchor="end"))
    marks.append(element("text", f"{share:.0%}", x=left - 8, y=12, text_anchor="end"))
    marks.append(element("text", "0%", x=left - 8, y=f"{middle + 4:.1f}", text_anchor="end"))
    marks.append(
        element("text", "error in ulps", x=f"{(left + CHART_WIDTH) / 2:.1f}", y=CHART_HEIGHT - 4, text_anchor="middle")
    )
    return element(
        "svg", element("title", title), marks, viewBox=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}", role="img", aria_label=title
    )
