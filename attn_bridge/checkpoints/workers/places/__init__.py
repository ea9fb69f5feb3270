"""Staging places of a conversion: locks, the job, journals, the payload, and its publication.

`StagingPlace` is their interface; `local` is a folder next to the target, `stored` are objects of a store.
"""

from __future__ import annotations

from pathlib import Path

from ...containers.remote import is_remote
from .staging import StagingPlace

__all__ = ["StagingPlace", "place_of"]


def place_of(target: Path) -> StagingPlace:
    """Return the staging place of a target: a folder next to it, or objects of its store."""
    if is_remote(target):
        from .stored import StoredPlace

        return StoredPlace(target)
    from .local import LocalPlace

    return LocalPlace(target)
