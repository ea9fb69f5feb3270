"""What the commands share: progress on a terminal, and a report on stdout and in files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..parity.rendering.files import hold_pipe, write_pipe

if TYPE_CHECKING:
    from ..parity.compare.results.report import Report


def check_writable(target: str, option: str = "--json") -> None:
    """Find out before the work, not after it, that a report cannot be written to a file; "-" is stdout.

    Raises:
        ValueError: it cannot.
    """
    path = Path(target)
    if target != "-" and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ValueError(f"{option} {path} cannot be written")
    if target != "-":
        try:
            hold_pipe(path)
        except ValueError as error:
            raise ValueError(f"{option} {error}") from None


def write_json(data: dict[str, Any], target: str) -> None:
    """Write a report to a file, or to stdout for "-"."""
    text = json.dumps(data, indent=1, allow_nan=False)
    if target == "-":
        typer.echo(text)
    elif not write_pipe(Path(target), text + "\n"):
        Path(target).write_text(text + "\n", encoding="utf-8")


def temporary_page() -> str:
    """Return a new file for a page that nobody keeps; a browser reads it after the command has ended."""
    stream, path = tempfile.mkstemp(prefix="attn-bridge-", suffix=".html")
    os.close(stream)
    return path


def open_in_browser(path: str | Path) -> None:
    """Show a page in the reader's browser; where there is none, say on stderr where the page is."""
    address = Path(path).absolute().as_uri()
    try:
        is_open = webbrowser.open(address)
    except (webbrowser.Error, OSError):
        is_open = False
    if not is_open:
        print(f"no browser could be started; the page is {address}", file=sys.stderr)


@contextlib.contextmanager
def written(*writes: Callable[[], object]) -> Iterator[None]:
    """Write every file, let the report be shown, and raise only then what a file raised.

    What took long to find out is lost neither where a file can't be written nor where nobody reads what is shown.
    """
    errors: list[OSError | ValueError] = []
    for write in writes:
        try:
            write()
        except (OSError, ValueError) as error:
            errors.append(error)
    yield
    if errors:
        raise errors[0]


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a progress bar on stderr while the terminal is one; nothing otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as stream,  # what user code prints goes elsewhere
        Progress(*columns, console=Console(file=stream), transient=True) as bar,
    ):
        task = bar.add_task("starting")

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield advance


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where the report of a comparison goes; a file that cannot be written is found out here.

    Attributes:
        html: file for the page.
        json: file for the JSON, "-" for stdout in place of the table.
        junit: file for the JUnit XML.
        full: whether the table shows everything.
        is_shown: whether the page is opened in a browser; without `html` it is a temporary file.
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
        given = {f"--{name}": getattr(self, name) for name in ("html", "json", "junit")}
        files = {option: target for option, target in given.items() if target not in (None, "-")}
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

        from ..parity.compare.results import allowances
        from ..parity.rendering import terminal
        from ..parity.rendering.text import one_line

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
