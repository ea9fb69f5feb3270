"""The cells of pages run; ``make site`` executes them too, and the notebooks, and looks at what they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import matplotlib
import pytest

from .test_documentation import ROOT, run_as_printed

PAGES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("concepts", "learn")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
]
CELL = re.compile(
    r"^```\{code-cell\} ipython3\n(?:---\n.*?^---\n|(?::\w+: [^\n]*\n)*)(.*?)^```$", re.DOTALL | re.MULTILINE
)
SHELL = re.compile(r"^!((?:.*\\\n)*.*)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _unseen(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    backend = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.use(backend)


@pytest.mark.usefixtures("own_process")
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive", "ignore::DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_cells_of_a_page_run(page):
    names: dict[str, object] = {"__name__": "__main__"}
    text = (ROOT / page).read_text(encoding="utf-8")
    cells = CELL.findall(text)
    assert all(cells)
    assert len(cells) == text.count("```{code-cell}") > 0
    for cell in cells:
        if cell.startswith("%%writefile "):
            name, _, content = cell.removeprefix("%%writefile ").partition("\n")
            Path(name).write_text(content, encoding="utf-8")
            continue
        for position, part in enumerate(SHELL.split(cell)):
            if position % 2:
                run_command_line(part)
            else:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(part, page, "exec"), names)


def run_command_line(text: str) -> None:
    """Run the first command of a line; a notebook ignores its status, but it must not end in a traceback."""
    command = re.split(r" \||2>&1", text.replace("\\\n", ""))[0]
    _, printed = run_as_printed(command)
    assert "Traceback" not in printed, printed
