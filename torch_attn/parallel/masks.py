"""The part of a mask for some sequences, heads, queries and keys: descriptions are shifted, arrays are cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.types import Device

from attn_bridge.masks import ArrayMask, Mask
from attn_bridge.masks.description import AnyOf, Combined, Offset
from attn_bridge.masks.sequences import Equal, Padding

from .devices import as_scores

ALL = slice(None)


def part_of(mask: Mask, batch: slice, heads: slice = ALL) -> Mask:
    """Return a mask for some sequences and heads; its arrays have four axes then."""
    return _map(mask, lambda array: _cut(array, batch, 0, heads, 1))


def block_of(mask: Mask | None, queries: range, keys: range, device: Device) -> Mask | None:
    """Return a mask for a block of queries and keys, as they see each other from their first; None shows all."""
    if mask is None or mask.visibility(queries, keys) is True:
        return None
    rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
    if isinstance(mask, Combined):
        parts = [block_of(part, queries, keys, device) for part in mask.parts]
        kept = tuple(part for part in parts if part is not None)
        if not kept or (isinstance(mask, AnyOf) and len(kept) < len(parts)):
            return None
        return kept[0] if len(kept) == 1 else type(mask)(kept)
    if isinstance(mask, (ArrayMask, Equal)):
        return _map(mask, lambda array: _cut(array, rows, 2, columns, 3))
    if isinstance(mask, Padding):
        return Padding(mask.lengths - keys.start)
    if isinstance(mask, Offset) and isinstance(mask.mask, Padding):
        return Padding(mask.mask.lengths - mask.keys - keys.start)
    if next(mask.arrays(), None) is None:
        return mask.offset(queries.start, keys=keys.start)
    # A description of somebody else's, which may hold anything.
    at = (torch.arange(block.start, block.stop, device=device) for block in (queries, keys))
    of_queries, of_keys = at
    return ArrayMask(as_scores(mask.allowed(of_queries[:, None], of_keys[None, :])))


def _map(mask: Mask, cut: Callable[[Tensor], Tensor]) -> Mask:
    if isinstance(mask, Combined):
        return type(mask)(tuple(_map(part, cut) for part in mask.parts))
    if isinstance(mask, ArrayMask):
        return ArrayMask(cut(as_scores(torch.as_tensor(mask.array))))
    return mask.with_arrays(cut) if next(mask.arrays(), None) is not None else mask


def _cut(array: Tensor, rows: slice, first: int, columns: slice, second: int) -> Tensor:
    for axis, part in ((first, rows), (second, columns)):
        if array.ndim > axis and array.shape[axis] > 1:
            array = array[(ALL,) * axis + (part,)]
    return array
