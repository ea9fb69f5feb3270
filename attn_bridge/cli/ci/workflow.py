"""GitHub's display of a run: annotations at lines of source, a summary of the step, and the step's outputs."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .places import SourceLine

LEVELS = ("error", "warning", "notice")


def annotation(level: str, title: str, message: str, location: SourceLine | None = None) -> str:
    """Return the workflow command that annotates a line, or the run without a place."""
    if level not in LEVELS:
        raise ValueError(f"level ({level}) must be one of {', '.join(LEVELS)}")
    where = {} if location is None else {"file": location.file, "line": str(location.line)}
    properties = ",".join(f"{key}={_property(value)}" for key, value in {**where, "title": title}.items())
    return f"::{level} {properties}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


@contextlib.contextmanager
def other_peoples_output() -> Iterator[None]:
    """Keep text printed meanwhile from being parsed as workflow commands."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        yield
    finally:
        sys.stdout.flush()
        print(f"::{token}::", flush=True)


def summarise(lines: list[str]) -> None:
    """Add Markdown to the summary of the step, if this is one."""
    _append("GITHUB_STEP_SUMMARY", "\n".join(lines) + "\n")


def set_outputs(outputs: Mapping[str, str]) -> None:
    """Set outputs of the step, each one line."""
    _append("GITHUB_OUTPUT", "".join(f"{key}={' '.join(value.split())}\n" for key, value in outputs.items()))


def _append(variable: str, text: str) -> None:
    file = os.environ.get(variable)
    if file:
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(text)
