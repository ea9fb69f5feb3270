"""Links within the site lead to pages, and places on them, that are there; ``make links`` asks for the others."""

from __future__ import annotations

import functools
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .conftest import SITE
from .test_pages import PAGES


class Links(HTMLParser):
    """The links of a page and the places on it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.links += [named[name] or "" for name in ("href", "src") if name in named]
        self.places |= {named[name] or "" for name in ("id", "name") if name in named}


@functools.cache
def read(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page, lost = SITE / name, []
    for link in read(page).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not target.is_file() or (
            parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).places
        ):
            lost.append(link)
    assert lost == []
