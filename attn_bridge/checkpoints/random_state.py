"""State of random streams of Flax NNX, a key and a count each, which is no part of a model's weights."""

from __future__ import annotations

from collections.abc import Mapping

from .containers.base import TensorInfo

REASON = "it is the state of a random stream"
VALUE, COUNT, KEY = ".value", ".count", ".key"


def names_of(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of keys and counts: ``X.count``, a whole number, next to ``X.key``, one of a few."""
    names = []
    for name, info in tensors.items():
        bare = name.removesuffix(VALUE)
        if not bare.endswith(COUNT) or info.dtype != "uint32" or info.shape:
            continue
        key = tensors.get(bare.removesuffix(COUNT) + KEY + name[len(bare) :])
        if key is not None and key.dtype == "uint32" and len(key.shape) == 1 and key.shape[0] in (2, 4):
            names += [name, key.name]
    return names
