"""Shared by the commands: progress on a terminal, and data on stdout and in files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from .. import whole_files as files


def check_writable(target: str, option: str = "--json") -> None:
    """Check before the work that a report can be written to a file; "-" is stdout.

    Raises:
        ValueError: it cannot.
    """
    if target == "-":
        return
    path = Path(target)
    try:
        files.checked(path)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: permission denied")


def write_json(data: dict[str, object], target: str) -> None:
    """Write a report to a file, which is complete or absent, or to stdout for "-".

    Raises:
        ValueError: the file can't be written.
    """
    text = json.dumps(data, indent=1, allow_nan=False)
    if target == "-":
        typer.echo(text)
    else:
        files.write(files.checked(target), text + "\n")


def temporary_page() -> str:
    """Return a new file for a temporary page; it is kept, since a browser reads it after the command has ended."""
    stream, path = tempfile.mkstemp(prefix="attn-bridge-", suffix=".html")
    os.close(stream)
    return path


def open_in_browser(path: str | Path) -> None:
    """Show a page in the user's browser; without a browser, print its path on stderr."""
    address = Path(path).absolute().as_uri()
    try:
        is_open = webbrowser.open(address)
    except (webbrowser.Error, OSError):
        is_open = False
    if not is_open:
        print(f"no browser could be started; the page is {address}", file=sys.stderr)


@contextlib.contextmanager
def written(*writes: Callable[[], object]) -> Iterator[None]:
    """Write every file, show the report in the body, and only then raise the first error of a file.

    Results that took long survive both a file that can't be written and output that has no reader.
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
