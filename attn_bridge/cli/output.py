"""What the commands share: progress on a terminal, and data on stdout and in files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from ..whole_files import hold_pipe, write_pipe


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
