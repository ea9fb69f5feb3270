"""The report as one HTML page that needs nothing else: no network, no fonts, no other file."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bridge import whole_files as files

from ...results.findings import Verdict, between_words, itself, shown
from .. import outline
from ..text import count, memory, relative
from . import figures, modules, tensors
from .markup import Child, Markup, badge, clue, element, facts, hint, items, named, row, scrolled, table

if TYPE_CHECKING:
    from ...results.report import Report

MEANINGS: dict[Verdict, str] = {
    "equal": "Both sides mean the same, and each is as precise as the other.",
    "precision": "Both sides mean the same, but one loses more precision than its share.",
    "different": "The two sides do not compute the same.",
    "inconclusive": "It could not be told whether the two sides compute the same.",
}
COVERAGE = (
    ("unexercised", "Unexercised parameters", "No comparison reached them."),
    ("invariances", "Invariances", "The outputs do not depend on these parameters although they are used."),
    ("unreached", "Not covered", "Branches and arguments that this comparison did not enter."),
)


def as_html(report: Report, path: str | Path | None = None) -> str:
    """Return the report as one self-contained page.

    Args:
        report: what `compare` found.
        path: file to write it to as well.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    sections = [section for section in _sections(report) if section is not None]
    title = f"{report.verdict}: {report.sides}"
    return written(target, title, _header(report, sections), (body for _, _, body in sections))


def written(target: Path | None, title: str, header: Child, main: Child) -> str:
    """Return a self-contained page around a header and a main part, and write it to the target file, if any."""
    page = _shell(title, header, element("main", main, id="results", tabindex=-1))
    text = f"<!doctype html>\n{page}\n"
    files.write(target, text)
    return text


def _shell(title: str, *body: Child) -> Markup:
    folder = importlib.resources.files(__package__)
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Even markup that slipped through the escaping could neither run a script nor reach a network.
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("title", title),
            element("link", rel="icon", href="data:,"),
            element("style", Markup(style)),
        ),
        element(
            "body",
            element("a", "Skip to the results", href="#results", class_="skip"),
            *body,
            element("footer", element("p", "Written by attn-bridge. This page needs no network.")),
            element("script", Markup(script)),
        ),
        lang="en",
    )


Section = tuple[str, str, Markup]
"""Id, title for the navigation, and body."""


def _sections(report: Report) -> Iterable[Section | None]:
    yield _section("tree", "Modules", modules.section(report)) if report.tree is not None else None
    yield _section("tensors", "Tensors", tensors.section(report))
    yield _section("notes", "Notes", items(report.notes)) if report.notes else None
    yield _section("pictures", "Pictures", figures.section(report)) if report.pictures else None
    yield _section("pairing", "Pairing", _pairing(report)) if report.pairing else None
    coverage, environment = _coverage(report), _environment(report)
    yield _section("coverage", "Coverage", coverage) if coverage else None
    yield _section("environment", "Environment", environment) if environment else None


def _section(name: str, title: str, body: Child) -> Section:
    heading = element("h2", title, id=f"{name}-title")
    return name, title, element("section", heading, body, id=name, aria_labelledby=f"{name}-title")


# ---- top of the page


def _header(report: Report, sections: Sequence[Section]) -> Markup:
    effort = [
        count(len(report.tensors), "tensor"),
        f"{count(report.samples, 'run')} ({count(report.seeds, 'seed')})",
        f"{report.seconds:.1f} s",
    ]
    if report.peak_memory:
        effort.append(f"{memory(report.peak_memory)} at the peak")
    command = report.command and element(
        "div",
        element("span", "Run it again", class_="label"),
        element("code", report.command, id="command"),
        element("button", "Copy", type="button", id="copy"),
        element("span", class_="hint", role="status", id="copied"),
        class_="command",
    )
    return element(
        "header",
        element(
            "h1",
            badge(report.verdict),
            element("span", report.first_name, element("small", shown(report.first_label))),
            element("span", "and", class_="and"),
            element("span", report.second_name, element("small", shown(report.second_label))),
        ),
        element(
            "p", MEANINGS[report.verdict], " ", element("span", ", ".join(effort), class_="hint"), class_="meaning"
        ),
        element("p", report.message, class_="message") if report.message else None,
        _divergence(report),
        tensors.worst(report),
        (element("p", str(one), class_="note") for one in report.allowed),
        map(hint, report.changes.lines()) if report.changes is not None else None,
        command or None,
        element("nav", (element("a", title, href=f"#{name}") for name, title, _ in sections), aria_label="Sections"),
        class_=report.verdict,
    )


def _divergence(report: Report) -> Markup | None:
    first = report.first_divergence
    if first is None:
        return None
    where = first.path or itself(first.first_name)
    second = first.second_path or itself(first.second_name)
    if first.between is not None:
        where = between_words(first.path, first.between)
    return element(
        "div",
        element("h2", f"First divergence, {first.direction}", id="divergence-title"),
        element("p", element("code", where), class_="where"),
        element("p", "inside ", element("code", first.path)) if first.between is not None and first.path else None,
        hint(f"{shown(report.second_label)}: ", element("code", second)) if first.second_path != first.path else None,
        element("p", first.message) if first.message else None,
        element("p", "Not excluded: ", first.others) if first.others else None,
        clue(first.hint),
        class_="divergence",
        role="region",
        aria_labelledby="divergence-title",
    )


# ---- end of the page


def _pairing(report: Report) -> list[Markup]:
    extent = f"{count(len(report.pairing), 'parameter')}: {outline.ways(report.pairing)}."
    first, second = shown(report.first_label), shown(report.second_label)
    rows = (
        row(named(pair.first), named(pair.second), element("code", pair.pattern), pair.how) for pair in report.pairing
    )
    heads = (first, second, f"Pattern, {first} axes to {second} axes", "Settled by")
    return [hint(extent), scrolled(table(heads, rows), "Pairing of parameters")]


def _coverage(report: Report) -> list[Markup]:
    parts = []
    for field, title, meaning in COVERAGE:
        names = getattr(report, field)
        if names:
            parts += [
                element("h3", f"{title} ({len(names):,})"),
                hint(meaning),
                items(names, f"names {field}"),
            ]
    if not parts and report.tensors:
        parts.append(hint("Every parameter was exercised, and no branch is known to be left out."))
    return parts


def _environment(report: Report) -> list[Markup]:
    tables = []
    if report.environment:
        tables.append(facts(report.environment.items(), "Versions and switches"))
    if report.noise:
        noise = ((name, relative(value)) for name, value in report.noise.items())
        tables.append(facts(noise, "Each side against itself (relative difference)"))
    return [element("div", tables, class_="facts")] if tables else []
