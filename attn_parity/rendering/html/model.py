"""The report on a whole model as one HTML page: a section per part, and how far apart the logits of each token are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bridge import whole_files as files

from ...results.findings import shown
from ..text import count
from .markup import Markup, badge, clue, element, hint, items, named, row, scrolled, section, table
from .page import MEANINGS, written

if TYPE_CHECKING:
    from ...check.model.report import Decoding, ModelReport, PairVerdict, PartVerdict

WIDTH, HEIGHT, LEFT = 720, 180, 56
"""Size of the chart of logits, and the room for its scale."""

LEAST = 1e-18
"""Divergence in nats that is drawn as nothing."""


def as_html(report: ModelReport, path: str | Path | None = None) -> str:
    """Return the report as one self-contained page.

    Args:
        report: what `check_model` found.
        path: file to write it to as well.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    main = (_parts(report), _logits(report), _notes(report))
    return written(target, f"{_verdict(report)}: {report.folder}", _header(report), main)


def _verdict(report: ModelReport) -> str:
    first = report.first_divergence
    return first.verdict if first is not None else "inconclusive" if report.stopped else "equal"


def _header(report: ModelReport) -> Markup:
    verdict, first = _verdict(report), report.first_divergence
    equal = sum(part.verdict == "equal" for part in report.parts)
    by = "transformers" if report.oracle == "transformers" else "the torch twin"
    effort = [f"{equal} of {count(len(report.parts), 'part')} equal", report.dtype, f"{report.seconds:.0f} s"]
    meaning = "Interrupted; parts are missing. " if report.stopped else ""
    return element(
        "header",
        element("h1", badge(verdict), element("span", report.folder)),
        element(
            "p",
            meaning,
            next(text for name, text in MEANINGS.items() if name == verdict),
            " ",
            element("span", ", ".join(filter(None, effort)), class_="hint"),
            class_="meaning",
        ),
        hint(f"The Flax twin, judged by {by}."),
        hint("Against the weights of ", element("code", report.against)) if report.against != report.folder else None,
        _divergence(first) if first is not None else None,
        class_=verdict,
    )


def _divergence(part: PartVerdict) -> Markup:
    return element(
        "div",
        element("h2", f"First divergence, {part.direction or part.verdict}", id="divergence-title"),
        element("p", element("code", part.place or part.name), class_="where"),
        clue(part.hint),
        class_="divergence",
        role="region",
        aria_labelledby="divergence-title",
    )


def _parts(report: ModelReport) -> Iterable[Markup]:
    for part in report.parts:
        name = part.name.replace(".", "-")
        yield section(
            name,
            (part.name, " ", badge(part.verdict)),
            element("p", "At ", element("code", part.place), f", {part.direction}.") if part.place else None,
            clue(part.hint),
            element("ul", map(_pair, part.pairs), _decoding(part.decoding), class_="note-list"),
            (_worst(pair) for pair in part.pairs if pair.worst),
        )


def _pair(pair: PairVerdict) -> Markup:
    sides = f"{shown(pair.first)} and {shown(pair.second)}"
    location = [", at ", element("code", pair.place)] if pair.place else []
    tensors = count(pair.tensors, "tensor")
    return element("li", f"{sides}: {pair.verdict}", location, f"; {tensors}, {pair.seconds:.1f} s")


def _decoding(decoding: Decoding | None) -> Markup | None:
    if decoding is None:
        return None
    apart = ", ".join(f"{shown(side)} {value:.1e}" for side, value in decoding.apart.items())
    text = f"decoding with a cache: {decoding.verdict}; apart from all at once, of the largest value: {apart}"
    return element("li", f"{text}. {decoding.message}".strip())


def _worst(pair: PairVerdict) -> Markup:
    heads = ("Tensor", "Verdict", f"Why ({shown(pair.first)} and {shown(pair.second)})")
    rows = (row(named(one.name), badge(one.verdict), one.message) for one in pair.worst)
    return scrolled(table(heads, rows), "Tensors that are furthest off", "scroll")


def _logits(report: ModelReport) -> Markup | None:
    tokens = [one for row in report.kl for one in row]
    if not tokens:
        return None
    text = (
        f"At most {max(tokens):.2e} nats, on average {sum(tokens) / len(tokens):.2e}; a bar per token, in logarithms."
    )
    title = "Logits: Kullback-Leibler divergence per token"
    return section("logits", title, hint(text), _chart(tokens, text))


def _chart(tokens: list[float], text: str) -> Markup:
    low, high = math.log10(LEAST), math.ceil(math.log10(max(*tokens, LEAST * 10)))
    step = (WIDTH - LEFT) / len(tokens)

    def height(value: float) -> float:
        return max(0.0, (math.log10(max(value, LEAST)) - low) / (high - low)) * (HEIGHT - 24)

    bars = [
        element(
            "rect",
            element("title", f"token {place}: {value:.2e} nats"),
            x=round(LEFT + place * step, 2),
            y=round(HEIGHT - 12 - height(value), 2),
            width=round(max(step * 0.8, 0.5), 2),
            height=round(height(value), 2),
            fill="currentColor",
        )
        for place, value in enumerate(tokens)
    ]
    ticks = [
        element("text", f"1e{power}", x=4, y=round(HEIGHT - 8 - height(10.0**power), 2), fill="currentColor")
        for power in range(int(low) + 3, int(high) + 1, max(3, int(high - low) // 5))
    ]
    return element(
        "svg", *bars, *ticks, viewBox=f"0 0 {WIDTH} {HEIGHT}", width="100%", role="img", aria_label=text, font_size=11
    )


def _notes(report: ModelReport) -> Markup | None:
    notes = [*report.notes, *dict.fromkeys(note for part in report.parts for pair in part.pairs for note in pair.notes)]
    if not notes:
        return None
    return section("notes", "Notes", items(notes))
