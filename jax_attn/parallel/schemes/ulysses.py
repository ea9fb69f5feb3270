"""Context parallel attention that exchanges tokens for heads: each device serves all queries of some heads.

DeepSpeed-Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jax import Array, lax

from ..heads import heads_to_hold
from .part import Part


def attend(part: Part, axis: str, devices: int) -> Array:
    """Return the context of the device's queries, whose tokens an axis of the mesh cuts."""
    heads, key_heads = part.query.shape[2], part.key.shape[2]
    query = _to_heads(part.query, axis)
    # Who needs which key heads; those that several devices need go to each of them.
    order = heads_to_hold(heads, key_heads, devices).ravel()
    key = _to_heads(_in_order(part.key, order), axis)
    value = key if part.value is part.key else _to_heads(_in_order(part.value, order), axis)
    context = dataclasses.replace(part, query=query, key=key, value=value).attend()
    return lax.all_to_all(context, axis, 1, 2, tiled=True)


def _in_order(array: Array, heads: np.ndarray) -> Array:
    return array if np.array_equal(heads, np.arange(array.shape[2])) else array[:, :, heads]


def _to_heads(array: Array, axis: str) -> Array:
    return lax.all_to_all(array, axis, 2, 1, tiled=True)
