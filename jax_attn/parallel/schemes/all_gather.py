"""Context parallel attention that gathers all keys and values: each device attends from its queries to all of them."""

from __future__ import annotations

import dataclasses

from jax import Array, lax

from ...signatures.attention import Output
from .part import Part


def attend(part: Part, axis: str, starts: tuple[tuple[int, ...], ...]) -> Output:
    """Return the context of the device's queries, and the weights if asked for.

    Args:
        part: the device's part of the call, with the keys of this device, in order.
        axis: axis of the mesh that cuts the tokens.
        starts: for each piece of the queries where it starts, on each device.
    """
    key = _gather(part.key, axis)
    value = key if part.value is part.key else _gather(part.value, axis)
    return dataclasses.replace(part, key=key, value=value).attend(axis, starts)


def _gather(array: Array, axis: str) -> Array:
    return lax.all_gather(array, axis, axis=1, tiled=True)
