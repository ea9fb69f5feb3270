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
