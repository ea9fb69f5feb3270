"""Context parallel attention that gathers all keys and values: each device attends from its queries to all of them."""

from __future__ import annotations

from typing import Any

from jax import Array, lax

from .part import Part


def attend(part: Part) -> Any:
    """Return the context of the device's queries, and the weights if asked for."""
    if part.keys_are_cut:
        key = _gather(part.key, part.axis)
        value = key if part.value is part.key else _gather(part.value, part.axis)
        part = part.replace(key=key, value=value)
    return part.attend()


def _gather(array: Array, axis: str | None) -> Array:
    return lax.all_gather(array, axis, axis=1, tiled=True)
