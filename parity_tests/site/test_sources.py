"""Every block of docs runs: of pages and guides in the tours, else as cells; and notebooks are in step with pages."""

import re
import runpy

import pytest

from .conftest import ROOT

PLAIN = "guides"
"""The folder whose blocks are text that the tours run, as those of the pages above it."""

PAGES = sorted(
    path
    for path in (ROOT / "docs").rglob("*/*.md")
    if not (folder := path.relative_to(ROOT / "docs").parts[0]).startswith("_") and folder != PLAIN
)
FENCE = re.compile(r"^(?P<before>.*)\n+(?P<fence>`{3,})(?P<language>.*)\n(?P<text>(?:.*\n)*?)(?P=fence)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_blocks_of_a_page_are_cells(page):
    text = page.read_text(encoding="utf-8")
    left = [
        block["text"]
        for block in FENCE.finditer(text)
        if not block["language"].startswith(("{code-cell} ipython3", "{eval-rst}"))
        and not block["before"].startswith("<!-- not run: ")
    ]
    assert left == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_cells_are_as_wide_as_code_may_be(page):
    cells = [one["text"] for one in FENCE.finditer(page.read_text(encoding="utf-8")) if "code-cell" in one["language"]]
    code = [re.sub(r"\A---\n(?:.*\n)*?---\n", "", one) for one in cells]
    assert [line for one in code for line in one.splitlines() if len(line) > 120] == []


def test_notebooks_are_those_that_the_pages_make():
    made = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))["notebooks"]()
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert len(made) == 5
    assert kept == made, "make notebooks writes them"
