"""The tables of a rules file, with the place of each for messages; what they mean is said by who reads them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any


def read_tables(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """Return ``("file, line 5", table)`` of every ``[[rule]]`` in a TOML file.

    Raises:
        ValueError: not TOML, or something else than ``[[rule]]`` tables.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    tables = document.pop("rule", [])
    if document:
        raise ValueError(f"{path}: a rules file holds [[rule]] tables and nothing else, got {', '.join(document)}")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path}: rule must be tables, each headed [[rule]]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    places = [f"{path}, line {line}" for line in lines] if len(lines) == len(tables) else [str(path)] * len(tables)
    return list(zip(places, tables, strict=True))
