"""HTML as nested calls that escape whatever they are given."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable
from typing import TypeAlias

from attn_bridge.printable import visible


class Markup(str):
    """Text that is HTML already; every other text is escaped."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"

_VOID = frozenset({"img", "input", "link", "meta", "col"})


def element(tag: str, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """Return an element; ``class_`` is written ``class``, ``aria_label`` ``aria-label``, None and False not at all."""
    written = []
    for key, value in attributes.items():
        if value is not None and value is not False:
            name = key.rstrip("_").replace("_", "-")
            written.append(f" {name}" if value is True else f' {name}="{escaped(value)}"')
    start = f"<{tag}{''.join(written)}>"
    return Markup(start if tag in _VOID else f"{start}{joined(children)}</{tag}>")


def joined(children: Child) -> Markup:
    """Return children as HTML, one after the other."""
    if children is None:
        return Markup()
    if isinstance(children, Markup):
        return children
    if isinstance(children, str | int | float):
        return escaped(children)
    return Markup("".join(joined(child) for child in children))


@functools.lru_cache(maxsize=4096)
def escaped(value: str | int | float) -> Markup:
    """Return text that a browser shows as it is."""
    return Markup(html.escape(visible(value)))


# ---- what the pages have in common


def named(text: str) -> Markup:
    """Return a name of a tensor or submodule."""
    return element("span", text, class_="name")


def badge(verdict: str, text: str | None = None) -> Markup:
    """Return a verdict in its colour, or a text about tensors of that verdict."""
    return element("span", verdict if text is None else text, class_=f"verdict {verdict}")


def hint(*children: Child) -> Markup:
    """Return a paragraph that explains the element next to it."""
    return element("p", *children, class_="hint")


def items(texts: Iterable[Child], class_: str = "note-list") -> Markup:
    """Return a list of texts."""
    return element("ul", (element("li", one) for one in texts), class_=class_)


def row(head: Child, *cells: Child) -> Markup:
    """Return a row of a table: its head, then its cells."""
    return element("tr", element("th", head, scope="row"), (element("td", cell) for cell in cells))


def table(heads: Iterable[str], rows: Child) -> Markup:
    """Return a table with a row of heads."""
    head = element("tr", (element("th", one, scope="col") for one in heads))
    return element("table", element("thead", head), element("tbody", rows))


def scrolled(content: Markup, label: str, class_: str = "scroll tall") -> Markup:
    """Return a part that scrolls separately, also by keyboard."""
    return element("div", content, class_=class_, tabindex=0, role="region", aria_label=label)


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Markup:
    """Return a table of names and values."""
    caption = None if title is None else element("caption", title)
    return element("table", caption, element("tbody", (row(key, value) for key, value in rows)))


def section(name: str, title: Child, *body: Child) -> Markup:
    """Return a section under its heading."""
    return element("section", element("h2", title, id=name), *body, aria_labelledby=name)


def clue(text: str) -> Markup | None:
    """Return a hint on the cause of a difference; None for ""."""
    return element("p", element("strong", "Hint: "), text, class_="clue") if text else None
