"""A badge below the title of each notebook's page that opens the notebook in Colab."""

from __future__ import annotations

import re
from typing import Any

from addresses import COLAB
from sphinx.application import Sphinx


def add_badge(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the badge below the title."""
    folder, _, name = docname.rpartition("/")
    if folder == "notebooks" and name != "index":
        badge = f"[![Open this notebook in Colab](../_static/colab.svg)]({COLAB}/{name}.ipynb)"
        source[0] = re.sub(r"^(# .+)$", rf"\1\n\n{badge}", source[0], count=1, flags=re.MULTILINE)


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx what there is."""
    app.connect("source-read", add_badge)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
