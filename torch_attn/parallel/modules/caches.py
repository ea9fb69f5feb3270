"""Caches of sharded modules: each device has its heads of keys, values and states."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...decoding.cache import KeyValueCache
from ...decoding.recurrent_cache import RecurrentCache
from ..devices import Devices


def place_caches(sharding: Devices, caches: object) -> object:
    """Return caches, or tuples of them, with each device's heads of keys, values and states on it."""
    if isinstance(caches, tuple):
        return tuple(place_caches(sharding, one) for one in caches)

    def by_head(array: Tensor | None, axis: int | None) -> DTensor | None:
        if array is None:
            return None
        heads = axis if axis is not None and sharding.divides("tensor", array.shape[axis]) else None
        rows = 0 if sharding.divides("fsdp", array.shape[0]) else None
        return sharding.cut(array, {"tensor": heads, "fsdp": rows})

    if isinstance(caches, KeyValueCache):
        for name, axis in (("key", 2), ("value", 2), ("positions", None), ("visible", None), ("padding", None)):
            setattr(caches, name, by_head(getattr(caches, name), axis))
    if isinstance(caches, RecurrentCache):
        caches.state = by_head(caches.state, 1)
        caches.conv_state = by_head(caches.conv_state, None)
    return caches
