"""A training of both sides as one HTML page: losses, drift of the free runs, and the difference of each tensor.

During training, the page is rewritten and reloads, unless its reader pauses that; the last version does not reload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bridge import whole_files as files

from ..text import count, number, relative
from . import charts
from .markup import Markup, badge, element, facts, hint, items, named, scrolled, section, table
from .page import MEANINGS, written

if TYPE_CHECKING:
    from ...training.report import TrainingReport

CLASSES = {
    "torch moved": "side-none",
    "torch float64 moved": "side-none dashed",
    "torch float64": "side-first dashed",
    "flax float64": "side-second dashed",
    "torch": "side-first wide",
    "flax": "side-second",
}
"""Run -> class of its line, in drawing order: colour marks the side, dashes mark float64. Where both sides coincide,
the wide line of torch remains visible around the other."""

MOST_BARS = 80
"""Bars that fit the width of a chart."""

SECONDS = 2
"""Between two reloads."""


def as_html(report: TrainingReport, path: str | Path | None = None, *, running: bool = False) -> str:
    """Return the report as one self-contained page.

    Args:
        report: what `train` found, or has found so far.
        path: file to write it to as well.
        running: whether it still trains, so that the page reloads itself.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    title = f"{'training' if running else report.verdict}: {report.torch_name} and {report.flax_name}"
    main = (_losses(report), _growth(report), _tensors(report), _more(report))
    return written(target, title, _header(report, running), main)


def _header(report: TrainingReport, running: bool) -> Markup:
    done = len(next(iter(report.losses.values()), []))
    verdict = "running" if running else report.verdict
    meaning = (
        "Both sides train. " if running else next(text for name, text in MEANINGS.items() if name == verdict) + " "
    )
    first = report.first_difference
    live = element(
        "p",
        element("label", element("input", type="checkbox", id="live", checked=True, data_seconds=SECONDS),
                f" Reload every {SECONDS} seconds"),
        element("span", " Without scripts, reload the page yourself.", class_="hint"),
        class_="controls",
    )  # fmt: skip
    return element(
        "header",
        element(
            "h1",
            badge(verdict),
            element("span", report.torch_name, element("small", "torch")),
            element("span", "and", class_="and"),
            element("span", report.flax_name, element("small", "Flax")),
        ),
        element(
            "p",
            meaning,
            element("span", f"{done} of {count(report.steps, 'step')}, {report.dtype}", class_="hint"),
            class_="meaning",
        ),
        element("progress", f"{done} of {report.steps}", value=done, max=report.steps, aria_label="Steps taken")
        if running
        else None,
        live if running else None,
        element("p", report.message, class_="message") if report.message else None,
        element("div", element("p", str(first), class_="why"), class_="divergence") if first is not None else None,
        class_=verdict,
    )


def _losses(report: TrainingReport) -> Markup:
    classes = {name: report.losses[name] for name in CLASSES if report.losses.get(name)}
    series = {name: (CLASSES.get(name, "side-none"), values) for name, values in classes.items()}
    phrases = [f"{name} from {number(values[0], 4)} to {number(values[-1], 4)}" for name, values in classes.items()]
    words = f"Loss of each run over the steps: {'; '.join(phrases)}." if phrases else "No step was taken yet."
    return section("losses", "Losses", hint(words), charts.lines(series, words) if phrases else None)


def _growth(report: TrainingReport) -> Markup | None:
    if not report.growth:
        return None
    kinds = ("side-first", "side-second", "side-none", "side-first dashed", "side-second dashed", "side-none dashed")
    series = {name: (kinds[i % len(kinds)], values) for i, (name, values) in enumerate(report.growth.items())}
    phrases = [f"{name} {relative(values[-1])}" for name, values in report.growth.items() if values]
    words = f"Distance of the weights of two runs, relative to the weights, after the last step: {'; '.join(phrases)}."
    return section("growth", "How far the weights drift apart", hint(words), charts.lines(series, words))


def _tensors(report: TrainingReport) -> Markup | None:
    if not report.divergence:
        return None
    verdicts = {one.name: one.verdict for one in report.tensors}
    rows = sorted(report.divergence.items(), key=lambda item: -_largest(item[1]))
    heads = ("Tensor", "Verdict", "Largest difference", "At step", "Last difference", "Over the steps")
    body = []
    for name, values in rows:
        largest = _largest(values)
        at = next((i + 1 for i, one in enumerate(values) if one == largest), 0)
        verdict = verdicts.get(name, "")
        words = f"difference of {name} over {count(len(values), 'step')}, at most {relative(largest)}"
        body.append(
            element(
                "tr",
                element("th", named(name), scope="row"),
                element("td", badge(verdict) if verdict else None),
                element("td", relative(largest), class_="number"),
                element("td", at or "", class_="number"),
                element("td", relative(values[-1]) if values else "", class_="number"),
                element("td", charts.bars(_octaves(values), words)),
            )
        )
    about = (
        "Each step is taken by both sides from the same numbers, in float64; the difference is relative to the largest "
        "value of the tensor's kind. The bars are the differences of the steps, or of spans of steps, in powers of two."
    )
    return section("tensors", "Divergence by tensor", hint(about), scrolled(table(heads, body), "Table of tensors"))


def _largest(values: Sequence[float]) -> float:
    return max((one for one in values if math.isfinite(one)), default=math.inf if values else 0.0)


def _octaves(values: Sequence[float]) -> list[int]:
    """Return at most `MOST_BARS` bars, one per span of steps: its largest difference in octaves above 2 ** -60."""
    every = max(1, math.ceil(len(values) / MOST_BARS))
    spans = [values[place : place + every] for place in range(0, len(values), every)]
    return [max(0, round(math.log2(size)) + 60) if (size := min(_largest(span), 2.0**60)) > 0 else 0 for span in spans]


def _more(report: TrainingReport) -> list[Markup]:
    sections = []
    for name, title, texts in (("settings", "Settings", report.settings), ("notes", "Notes", report.notes)):
        if texts:
            sections.append(section(name, title, items(texts)))
    if report.environment:
        versions = facts(report.environment.items(), "Versions and switches")
        sections.append(section("environment", "Environment", element("div", versions, class_="facts")))
    return sections
