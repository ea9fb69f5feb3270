"""Where workers write to, and all that touches it: locks, the job, journals, the payload, and its publication.

`Place` is what workers ask of it; `local` is a folder beside the target, `stored` are objects of a store.
"""

from __future__ import annotations

from pathlib import Path

from ...containers.remote import is_remote
from .local import LocalPlace
from .place import Place

__all__ = ["LocalPlace", "Place", "place_of"]


def place_of(target: Path) -> Place:
    """Return where workers write a target to: a folder beside it, or objects of its store."""
    if is_remote(target):
        from .stored import StoredPlace

        return StoredPlace(target)
    return LocalPlace(target)
