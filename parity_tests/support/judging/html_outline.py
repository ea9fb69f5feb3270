"""An HTML page as its elements and its text, for tests to look at."""

from __future__ import annotations

import html.parser


class Outline(html.parser.HTMLParser):
    """Collects the elements of a page in order, and its text; whatever is opened must be closed."""

    VOID = frozenset({"img", "input", "link", "meta"})

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, {key: value or "" for key, value in attributes}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close what was opened last."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note text that a reader sees."""
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        """Return the attributes of all elements of a kind that have the `wanted` ones."""
        found = [attributes for name, attributes in self.elements if name == tag]
        return [one for one in found if all(one.get(key.rstrip("_")) == value for key, value in wanted.items())]

    @property
    def words(self) -> str:
        """The text in one line."""
        return " ".join(" ".join(self.text).split())
