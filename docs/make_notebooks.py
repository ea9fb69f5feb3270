"""Write notebooks/*.ipynb, which Colab opens, from the pages of docs/notebooks: ``make notebooks``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "docs" / "notebooks"
TARGETS = ROOT / "notebooks"
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

from addresses import COLAB, REPOSITORY, SITE  # noqa: E402 (found by the line above)

LINK = re.compile(r"\]\((?![a-z]+:)(?P<path>[^)#\s]+)\.md(?P<anchor>#[\w-]+)?\)")
INSTALL = f"""\
# In Colab: install attn-bridge, and transformers for the notebooks that use it.
import sys

if "google.colab" in sys.modules:
    %pip install "attn-bridge[all,viz] @ git+{REPOSITORY}" "transformers>=5" --quiet"""


def main() -> None:
    """Write every notebook."""
    TARGETS.mkdir(exist_ok=True)
    for name, text in notebooks().items():
        (TARGETS / name).write_text(text, encoding="utf-8")


def notebooks() -> dict[str, str]:
    """Return the text of each notebook by its file's name."""
    pages = sorted(path for path in SOURCES.glob("*.md") if path.stem != "index")
    return {f"{path.stem}.ipynb": notebook(path) for path in pages}


def notebook(page: Path) -> str:
    """Return a page as a notebook without outputs: with a badge, a cell that installs, and links to the site."""
    book = jupytext.reads(page.read_text(encoding="utf-8"), fmt="md:myst")
    badge = f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]({COLAB}/{page.stem}.ipynb)"
    book.cells[0].source = re.sub(r"^(# .+)$", rf"\1\n\n{badge}", book.cells[0].source, count=1, flags=re.MULTILINE)
    book.cells.insert(1, nbformat.v4.new_code_cell(INSTALL))
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"
        is_answer = cell.source.startswith("# @title ")
        cell.metadata = {"cellView": "form"} if is_answer else {}  # Colab shows the title alone
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(_address, cell.source)
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    book.nbformat, book.nbformat_minor = 4, 5
    nbformat.validate(book)
    return nbformat.writes(book, indent=1) + "\n"


def _address(link: re.Match[str]) -> str:
    target = (SOURCES / link["path"]).resolve().relative_to(ROOT / "docs")
    return f"]({SITE}/{target.as_posix()}.html{link['anchor'] or ''})"


if __name__ == "__main__":
    main()
