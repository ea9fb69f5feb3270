"""Context parallel attention that exchanges tokens for heads: each device serves all queries of some heads.

DeepSpeed-Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from ..exchange import exchange
from ..heads import heads_to_hold
from ..masks import part_of
from .part import Part


def attend(part: Part, group: ProcessGroup, rank: int, devices: int) -> Tensor:
    """Return the context of the device's queries, whose tokens the devices of a group share."""
    heads, key_heads = part.query.shape[2], part.key.shape[2]
    query = _to_heads(part.query, group, devices)
    # Who needs which key heads; those that several devices need go to each of them.
    order = heads_to_hold(heads, key_heads, devices).ravel()
    key = _to_heads(_in_order(part.key, order), group, devices)
    value = key if part.value is part.key else _to_heads(_in_order(part.value, order), group, devices)
    own = slice(rank * (heads // devices), (rank + 1) * (heads // devices))
    whole = dataclasses.replace(
        part,
        query=query,
        key=key,
        value=value,
        mask=None if part.mask is None else part_of(part.mask, slice(None), own),
        bias=_rows_of_heads(part.bias, group, rank, devices, own),
        sinks=None if part.sinks is None else part.sinks[own],
        keep=_rows_of_heads(part.keep, group, rank, devices, own),
        start=0,
    )
    return _to_tokens(whole.attend(), group, devices)


def _in_order(array: Tensor, heads: np.ndarray) -> Tensor:
    if np.array_equal(heads, np.arange(array.shape[2])):
        return array
    return array[:, :, torch.from_numpy(heads).to(array.device)]


def _to_heads(array: Tensor, group: ProcessGroup, devices: int) -> Tensor:
    """Return all tokens of the device's heads, from its tokens of all heads."""
    batch = array.shape[0]
    rows = rearrange(array, "b t (n h) c -> (n b t) h c", n=devices)
    counts = [len(rows) // devices] * devices
    return rearrange(exchange(rows, counts, counts, group), "(n b t) h c -> b (n t) h c", n=devices, b=batch)


def _to_tokens(array: Tensor, group: ProcessGroup, devices: int) -> Tensor:
    """Undo `_to_heads`."""
    batch = array.shape[0]
    rows = rearrange(array, "b (n t) h c -> (n b t) h c", n=devices)
    counts = [len(rows) // devices] * devices
    return rearrange(exchange(rows, counts, counts, group), "(n b t) h c -> b t (n h) c", n=devices, b=batch)


def _rows_of_heads(array: Tensor | None, group: ProcessGroup, rank: int, devices: int, own: slice) -> Tensor | None:
    """Return all rows of the device's heads of an operand of the scores, from its rows of all heads."""
    if array is None:
        return None
    if array.shape[2] == 1:
        return array[:, own] if array.shape[1] > 1 else array
    if array.shape[1] == 1:
        array = array.expand(-1, devices, -1, -1)
    is_bool = array.dtype == torch.bool
    rows = rearrange(array.to(torch.uint8) if is_bool else array, "b h t s -> b t h s")
    sums = rearrange(_to_heads(rows, group, devices), "b t h s -> b h t s")
    return sums.to(torch.bool) if is_bool else sums
