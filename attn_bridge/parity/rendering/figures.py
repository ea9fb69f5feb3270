"""Figures of the HTML page: heat maps of both sides and their difference, and histograms of their rounding errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..compare.report import Array, Picture, Report, TensorVerdict
from . import pictures
from .markup import Markup, element
from .text import index, number, shape, ulps

MOST = 24
"""Most tensors that are drawn; those that differ come first."""

OPEN = 3
"""How many of them are unfolded."""

MAP_SIZE, HEAD_SIZE = 256, 84
CHART_WIDTH, CHART_HEIGHT = 340, 170
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def section(report: Report) -> list[Markup]:
    """Return the body of the section on pictures, most telling first."""
    verdicts = {tensor.name: tensor for tensor in report.tensors}
    places = {tensor.name: place for place, tensor in enumerate(report.failures)}
    ordered = sorted(report.pictures, key=lambda picture: places.get(picture.name, len(places)))[:MOST]
    parts = []
    if len(report.pictures) > len(ordered):
        count = f"{len(ordered)} of {len(report.pictures):,} tensors, those that differ first."
        parts.append(element("p", count, class_="hint"))
    for place, picture in enumerate(ordered):
        tensor = verdicts.get(picture.name)
        verdict = tensor.verdict if tensor else "equal"
        parts.append(
            element(
                "details",
                element(
                    "summary",
                    element("span", picture.name, class_="name"),
                    element("span", verdict, class_=f"verdict {verdict}") if tensor else None,
                    element("span", shape(picture.first.shape), class_="hint"),
                ),
                element("div", _maps(picture), _histogram(picture, tensor), class_="figures"),
                open=place < OPEN,
                class_="picture",
            )
        )
    return parts


# ---- heat maps


def _maps(picture: Picture) -> Markup:
    torch, flax = picture.first, picture.second
    if not torch.size or torch.shape != flax.shape:
        why = "it has no elements" if not torch.size else f"torch has {shape(torch.shape)}, Flax {shape(flax.shape)}"
        return element("p", f"Not drawn: {why}.", class_="hint")
    if pictures.is_attention(torch) or pictures.is_attention(flax):
        return _head_maps(picture)
    both = pictures.matrix(torch), pictures.matrix(flax)
    rows, columns = both[0].shape
    caption = f"{rows} x {columns} elements"
    if max(rows, columns) > pictures.CELLS:
        caption += f", drawn as at most {pictures.CELLS} x {pictures.CELLS} cells, each the most extreme of its block"
    place = np.ravel_multi_index(pictures.furthest(*both), both[0].shape)
    caption += _largest(torch, flax, np.unravel_index(int(place), torch.shape))
    return _figure(picture.name, [(None, *both)], MAP_SIZE, caption)


def _head_maps(picture: Picture) -> Markup:
    """Return one small map per head of one sample of attention weights ``(B, H, T, S)``."""
    batch, heads, queries, keys = picture.first.shape
    sample, chosen = pictures.chosen_heads(picture.first, picture.second)
    maps = [(f"head {head}", picture.first[sample, head], picture.second[sample, head]) for head in sorted(chosen)]
    caption = f"attention weights, {queries} queries (down) x {keys} keys (across), sample {sample} of {batch}"
    if heads > len(chosen):
        caption += f", the {len(chosen)} of {heads} heads that differ most"
    place = pictures.furthest(picture.first[sample, chosen[0]], picture.second[sample, chosen[0]])
    caption += _largest(picture.first, picture.second, (sample, chosen[0], *place))
    return _figure(picture.name, maps, HEAD_SIZE, caption)


def _largest(torch: Array, flax: Array, place: Sequence[Any]) -> str:
    one, two = float(torch[tuple(place)]), float(flax[tuple(place)])
    if one == two or (one != one and two != two):
        return ""
    return f"; largest difference at {index(tuple(place))}: torch {number(one)}, Flax {number(two)}"


def _figure(name: str, maps: Sequence[tuple[str | None, Array, Array]], size: int, caption: str) -> Markup:
    """Return a table of pictures: a column per map, a row per side, and one of differences, with two scales."""
    torch = [pictures.shrink(one) for _, one, _ in maps]
    flax = [pictures.shrink(two) for _, _, two in maps]
    apart = [pictures.shrink(one, two) for _, one, two in maps]
    low, high = pictures.limits(*torch, *flax)
    largest = max(abs(limit) for limit in pictures.limits(*apart))
    sides = [
        ("torch", torch, low, high, False),
        ("Flax", flax, low, high, False),
        ("torch - Flax", apart, -largest, largest, True),
    ]
    wide = maps[0][0] is None  # a single map: the sides stand next to each other
    cells = [
        [
            _image(cells, low, high, diverging, size, f"{label} of {name}" + (f", {head}" if head else ""))
            for (head, _, _), cells in zip(maps, side, strict=True)
        ]
        for label, side, low, high, diverging in sides
    ]
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
    table = element("table", element("thead", head), element("tbody", body), class_="maps wide" if wide else "maps")
    not_finite = any(not np.isfinite(cells).all() for cells in (*torch, *flax, *apart))
    scales = element(
        "div",
        _scale("values", number(low, 4), number(high, 4), diverging=False),
        _scale("torch - Flax", number(-largest, 3), number(largest, 3), diverging=True)
        if largest
        else element("span", "no difference in any bit" if not not_finite else "no finite difference"),
        element("span", element("span", class_="swatch"), "not finite") if not_finite else None,
        class_="scales",
    )
    region = element("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"pictures of {name}")
    return element("figure", region, scales, element("figcaption", caption))


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


def _histogram(picture: Picture, tensor: TensorVerdict | None) -> Markup | None:
    """Return torch's errors as bars upwards and Flax's as bars downwards, over their size in octaves."""
    oracle = picture.oracle
    if oracle is None:
        return element("p", "No float64 result to measure the rounding errors of both sides against.", class_="hint")
    if not oracle.size or not picture.first.shape == picture.second.shape == oracle.shape:
        return None
    atom = pictures.unit(tensor.dtype if tensor else str(picture.first.dtype), oracle)
    if atom is None:
        return None
    torch, torch_rms, torch_max = pictures.error_histogram(picture.first, oracle, atom)
    flax, flax_rms, flax_max = pictures.error_histogram(picture.second, oracle, atom)
    used = np.flatnonzero(torch + flax)
    last = max(int(used[-1]), 1 - pictures.octave(0))  # one unit is always on the axis
    texts = [
        f"torch: rms {ulps(torch_rms)}, largest {ulps(torch_max)}",
        f"Flax: rms {ulps(flax_rms)}, largest {ulps(flax_max)}",
    ]
    title = f"errors of {picture.name} in units of the last place. {texts[0]}. {texts[1]}."
    return element(
        "figure",
        _chart(torch[: last + 1], flax[: last + 1], title),
        element(
            "figcaption",
            "Error against float64, in units of the last place of the largest value (shares of all elements). ",
            (
                element("span", text, class_=f"series {side}")
                for side, text in zip(("torch", "flax"), texts, strict=True)
            ),
        ),
        class_="histogram",
    )


def _chart(torch: Array, flax: Array, title: str) -> Markup:
    bins = len(torch)
    left, bottom = 46, 22
    step = (CHART_WIDTH - left - 6) / bins
    middle = (CHART_HEIGHT - bottom) / 2
    highest = max(int(torch.max()), int(flax.max()), 1)
    share = highest / max(int(torch.sum()), 1)
    marks = []
    for side, counts, up in (("torch", torch, True), ("flax", flax, False)):
        for place in np.flatnonzero(counts).tolist():
            height = max(1.5, float(counts[place]) / highest * (middle - 6))  # a single outlier stays visible
            marks.append(
                element(
                    "rect",
                    x=f"{left + place * step + 0.5:.1f}",
                    y=f"{middle - height - 0.5 if up else middle + 0.5:.1f}",
                    width=f"{max(step - 1, 1):.1f}",
                    height=f"{height:.1f}",
                    class_=side,
                )
            )
    for place in range(0, bins, 4):
        x = f"{left + place * step:.1f}"
        power = pictures.octave(place)
        label = "<2⁻⁷" if not place else "1" if not power else f"2{str(power).translate(_SUPERSCRIPTS)}"
        marks.append(element("line", x1=x, x2=x, y1=0, y2=CHART_HEIGHT - bottom + 3, class_="tick"))
        marks.append(element("text", label, x=x, y=CHART_HEIGHT - 6, text_anchor="middle"))
    marks.append(element("line", x1=left, x2=CHART_WIDTH, y1=f"{middle:.1f}", y2=f"{middle:.1f}", class_="axis"))
    for label, y in (("torch", middle / 2), ("Flax", middle * 1.5)):
        marks.append(element("text", label, x=left - 8, y=f"{y + 4:.1f}", text_anchor="end"))
    marks.append(element("text", f"{share:.0%}", x=left - 8, y=12, text_anchor="end"))
    return element(
        "svg", element("title", title), marks, viewBox=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}", role="img", aria_label=title
    )
