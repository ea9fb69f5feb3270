"""The place that goes with a target."""

from __future__ import annotations

from pathlib import Path

from ..containers.remote import is_remote
from .places import LocalPlace, Place


def place_of(target: Path) -> Place:
    """Return where workers write a target to: a folder beside it, or objects of its store."""
    if is_remote(target):
        from .stored import StoredPlace

        return StoredPlace(target)
    return LocalPlace(target)
