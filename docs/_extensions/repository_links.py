"""Links that leave docs/: pages of the repository become pages of the site or addresses in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from addresses import REPOSITORY
from sphinx.application import Sphinx

OUTSIDE = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[\w-]+)?\)")


def point_into_the_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace relative links to files outside of docs/ by their addresses in the repository."""
    page = Path(app.srcdir, docname)

    def address(found: re.Match[str]) -> str:
        target = (page.parent / found["path"]).resolve()
        docs = Path(app.srcdir).resolve()
        if target.is_relative_to(docs) or not target.is_relative_to(docs.parent) or not target.exists():
            return found[0]
        kind = "tree" if target.is_dir() else "blob"
        path = target.relative_to(docs.parent).as_posix()
        return f"]({REPOSITORY}/{kind}/main/{path}{found['anchor'] or ''})"

    source[0] = OUTSIDE.sub(address, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx what there is."""
    app.connect("source-read", point_into_the_repository)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
