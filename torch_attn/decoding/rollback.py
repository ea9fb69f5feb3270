"""Caches of calls that fail: they are written in place, and a call that raises leaves them as they were.

A rolling cache, whose new tokens take the place of old ones, is marked as lost instead. JAX needs no twin: there a call
returns a new cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
            overwrote = now.get("rolling") and 0 < fields["length"] < now["length"] > now["key"].shape[1]
            lost = {"lost": True} if overwrote or now.get("lost") else {}
            now.update({**fields, **lost})

    return restore


def _each(caches: object) -> Iterator[object]:
    if isinstance(caches, (tuple, list)):
        for cache in caches:
            yield from _each(cache)
    elif hasattr(caches, "length") and hasattr(caches, "capacity"):
        yield caches
