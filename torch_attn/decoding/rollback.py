"""Caches of calls that fail: they are written in place, and a call that raises leaves them as they were.

JAX needs no twin: there a call returns a new cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

_LOST: weakref.WeakSet[object] = weakref.WeakSet()
"""Rolling caches in which a failed call overwrote tokens."""

_MASKS = ("visible", "padding")
"""Arrays that a mask of padding is written to, also at earlier tokens."""


def restorer(caches: object, has_mask: bool) -> Callable[[], None]:
    """Return a function that gives caches the tokens that they have now.

    Args:
        caches: a cache, or those of a model in tuples; anything else is left alone.
        has_mask: whether the call has a mask.
    """
    saved = [(cache, dict(vars(cache))) for cache in _each(caches)]
    if has_mask:
        for _, fields in saved:
            fields.update({name: fields[name].clone() for name in _MASKS if name in fields})

    def restore() -> None:
        for cache, fields in saved:
            now = vars(cache)
            # Slots behind the length are free, and states are new tensors; a window that is full has no free slots.
            if now.get("rolling") and now["length"] > max(fields["length"], now["key"].shape[1]):
                _LOST.add(cache)
            now.update(fields)

    return restore


def check_whole(cache: object) -> None:
    """Check that a cache has all tokens that it counts.

    Raises:
        RuntimeError: a call that failed overwrote some.
    """
    if cache in _LOST:
        raise RuntimeError(
            "a call that failed overwrote tokens of the rolling cache; begin again with an empty one, or trim(0)"
        )


def mark_whole(cache: object) -> None:
    """Take a cache for whole, since it was emptied."""
    _LOST.discard(cache)


def _each(caches: object) -> Iterator[object]:
    if isinstance(caches, (tuple, list)):
        for cache in caches:
            yield from _each(cache)
    elif hasattr(caches, "length") and hasattr(caches, "capacity"):
        yield caches
