"""The page of a review: every pair with its verdict, allowances, and a link to its own report."""

from __future__ import annotations

from ..rendering.html.markup import Child, badge, element, facts, items, named, scrolled, table
from ..rendering.html.page import written
from ..results.changes import Data

COLUMNS = ("pair", "verdict", "result", "allowances")


def as_html(data: Data) -> str:
    """Return a self-contained page on the data of a review."""
    verdict = str(data["verdict"])
    head = (
        element("h1", badge(verdict), str(data["summary"])),
        facts([(name, str(data[key])) for name, key in _FACTS.items()]),
        items(_notes(data)),
    )
    rows = [_row(pair) for pair in data["pairs"]]
    body = element("section", element("h2", "Pairs"), scrolled(table(COLUMNS, rows), "Pairs"))
    return written(None, str(data["summary"]), element("header", *head, class_=verdict), [body])


_FACTS = {"Commit": "commit", "Files": "tree", "Manifest": "manifest"}
"""Label -> key of the review's data."""


def _notes(data: Data) -> list[str]:
    count = len(data["unreviewed"])
    dirty = [f"{count} uncommitted changes were not judged"] if count else []
    return [*data["earlier"], *dirty, *data["notes"]]


def _row(pair: Data) -> Child:
    link = element("a", "report", href=pair["page"]) if "page" in pair else None
    allowed = [f"allowed: {line}" for line in pair["allowed_differences"]]
    unneeded = [f"not needed: {line}" for line in pair["unneeded_allowances"]]
    sides = element("div", f"{pair['first']} and {pair['second']}", class_="kind")
    cells = (
        [named(pair["name"]), sides],
        badge(pair["verdict"]),
        [pair["message"], " ", link],
        items([*allowed, *unneeded]),
    )
    return element("tr", (element("td", cell) for cell in cells))
