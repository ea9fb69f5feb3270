"""Paths and URLs as arguments of commands."""

from __future__ import annotations

from pathlib import Path
from typing import cast


def place(text: str) -> Path:
    """Return what a user names: a path of this machine, or one behind a URL."""
    from ...checkpoints.containers.remote import to_path

    return to_path(text)


def is_remote(path: Path) -> bool:
    """Whether a path lies behind a URL."""
    return not isinstance(cast(object, path), Path)
