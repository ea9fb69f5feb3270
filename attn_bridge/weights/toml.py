"""TOML files: the tables of a rules file, each with its position for messages, and the files of a package."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from ..printable import printable
from ..whole_files import JsonObject, read_text

_NAMES = ("torch", "flax", "first", "second")

MAX_TEXT = 1000
"""Characters of a text in a rules file: a tensor's name, the longest of them, has no more."""


def read_tables(path: str | Path) -> list[tuple[str, dict[str, object]]]:
    """Return ``("file, line 5", table)`` of every ``[[rule]]`` in a TOML file.

    Raises:
        ValueError: not TOML, something else than ``[[rule]]`` tables, or a text that is too long.
        OSError: the file cannot be read.
    """
    try:
        text = read_text(path)
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {printable(error, 400)}") from error
    tables = document.pop("rule", [])
    if document:
        keys = printable(", ".join(document))
        raise ValueError(f"{path}: a rules file holds [[rule]] tables and nothing else, got {keys}")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path}: rule must be tables, each headed [[rule]]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    places = [f"{path}, line {line}" for line in lines] if len(lines) == len(tables) else [str(path)] * len(tables)
    for location, table in zip(places, tables, strict=True):
        for key, value in table.items():
            long = next((text for text in (key, *_texts(value)) if len(text) > MAX_TEXT), None)
            if long is not None:
                raise ValueError(f"{location}: {printable(key)} holds {printable(long)}; at most {MAX_TEXT} are read")
            if key in _NAMES and (bad := next((text for text in _texts(value) if not text.isprintable()), None)):
                raise ValueError(f"{location}: the name {printable(bad)} of {key} has characters that can't be printed")
    return list(zip(places, tables, strict=True))


def packaged(package: str, name: str) -> JsonObject:
    """Return a TOML file of a package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in itertools.chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _texts(part)
