"""Where a command writes the report of a comparison."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bridge.cli.output import check_writable, open_in_browser, temporary_page, write_json, written

if TYPE_CHECKING:
    from attn_bridge.whole_files import JsonObject

    from ..check.mesh.report import MeshReport
    from ..check.report import CheckReport
    from ..results.report import Report


def write_or_show(
    data: Callable[[], JsonObject], json_file: str | None, show: Callable[[], object], *writes: Callable[[], object]
) -> None:
    """Write a report's data to a JSON file, if any, and other files, and show it; "-" prints the data instead."""
    if json_file not in (None, "-"):
        writes = (lambda: write_json(data(), json_file), *writes)
    with written(*writes):
        if json_file == "-":
            write_json(data(), "-")
        else:
            show()


def show_table(report: CheckReport | MeshReport, lines: Iterable[str], width: int) -> None:
    """Print a report's table, lines, environment and summary; `width` columns for a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else width)
    console.print(report.table())
    facts = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    for line in (*lines, facts, report.summary()):
        console.print(line, markup=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The targets of a comparison's report; the constructor checks that files can be written.

    Attributes:
        html: file for the page.
        json: file for the JSON, "-" for stdout instead of the table.
        junit: file for the JUnit XML.
        full: whether the table shows everything.
        is_shown: whether the page is opened in a browser; without `html` it is a temporary file.

    Raises:
        ValueError: a file cannot be written, two are the same, or "-" for a file other than the JSON.
    """

    html: str | None = None
    json: str | None = None
    junit: str | None = None
    full: bool = False
    is_shown: bool = False

    def __post_init__(self) -> None:
        for name in ("html", "junit"):
            if getattr(self, name) == "-":
                raise ValueError(f"--{name} - cannot be written: only --json goes to stdout")
        targets = {f"--{name}": getattr(self, name) for name in ("html", "json", "junit")}
        files = {option: target for option, target in targets.items() if target not in (None, "-")}
        for option, target in files.items():
            check_writable(target, option)
        if len({Path(target).absolute() for target in files.values()}) < len(files):
            raise ValueError(f"{' and '.join(files)} must be different files")

    def write(self, report: Report, *more: str) -> int:
        """Write a report, then lines in the terminal, and return the exit status.

        Raises:
            ValueError: the verdict is ``inconclusive``, or a file cannot be written.
        """
        from rich.console import Console

        from ..rendering import terminal
        from ..rendering.text import one_line
        from ..results import allowances

        page = temporary_page() if self.is_shown and self.html is None else self.html
        writes = {page: report.to_html, self.junit: report.to_junit, self.json: report.to_json}
        with written(*(functools.partial(write, file) for file, write in writes.items() if file not in (None, "-"))):
            if self.json == "-":
                write_json(report.to_json(), "-")
            else:
                # A file or a pipe gets what print(report) gives, whatever the terminal's width is.
                console = Console(highlight=False, width=None if sys.stdout.isatty() else terminal.WIDTH)
                terminal.render(report, console, self.full)
                for line in more:
                    console.print(line, markup=False, soft_wrap=True)
        if self.is_shown and page is not None:
            open_in_browser(page)
        if report.verdict == "inconclusive":
            sys.stdout.flush()
            raise ValueError(f"inconclusive: {report.message}")
        for line in allowances.unknown(report):
            print(f"warning: --allow {one_line(line)}", file=sys.stderr)
        return 0 if report.passed else 1
