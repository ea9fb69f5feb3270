"""Paths and URLs as arguments of commands."""

from __future__ import annotations

from pathlib import Path
from typing import cast


def place(text: str) -> Path:
    """Return the path that a user names: local, or behind a URL."""
    from ...checkpoints.containers.remote import to_path

    return to_path(text)


def is_remote(path: Path) -> bool:
    """Return whether a path is behind a URL."""
    return not isinstance(cast(object, path), Path)
