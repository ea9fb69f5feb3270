"""Finds the line of the user's source for a report: the class of the submodule that diverges, or the factory."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Data = Mapping[str, Any]
"""JSON-ready data of a report."""


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of a file; the file's name is relative to the workspace."""

    file: str
    line: int


def of_report(report: Data, factory: str, folder: Path, workspace: Path) -> SourceLine | None:
    """Return the line to look at first.

    Args:
        report: the data of a comparison's report.
        factory: the side to blame, as it was named: ``file.py:factory`` or ``module:factory``.
        folder: the command's current folder.
        workspace: the root of the repository.
    """
    source, name = source_of(factory, folder)
    if source is None:
        return None
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        file = source.resolve().relative_to(workspace.resolve()).as_posix()
    except (OSError, ValueError, RecursionError):  # not Python, or outside the repository
        return None
    lines = {node.name: node.lineno for node in ast.walk(tree) if hasattr(node, "name") and hasattr(node, "lineno")}
    first = report.get("first_divergence")
    kinds = [] if not isinstance(first, Mapping) else list(_types(report.get("tree"), str(first.get("path"))))
    line = next((lines[kind] for kind in [*kinds, name] if kind in lines), 1)
    return SourceLine(file, line)


def source_of(factory: str, folder: Path) -> tuple[Path | None, str]:
    """Return the file of a factory and its name in it; None for a module that does not lie in the folder."""
    module, _, name = factory.rpartition(":")
    if module.endswith(".py"):
        return folder / module, name
    for front in (folder, folder / "src"):
        path = front.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file, name
    return None, name


def _types(node: object, path: str) -> Iterator[str]:
    """Yield the second side's classes of the submodule at a path, and of its parents, innermost first."""
    if not isinstance(node, Mapping):
        return
    own = str(node.get("path") or "")
    for child in node.get("children") or ():
        if isinstance(child, Mapping):
            at = str(child.get("path") or "")
            if path == at or path.startswith(f"{at}."):
                yield from _types(child, path)
    if own == path or not own or path.startswith(f"{own}."):
        yield str(node.get("second_type") or "").rpartition(".")[2]
