"""Context parallel attention that gathers all keys and values: each device attends from its queries to all of them."""

from __future__ import annotations

import torch

from ...signatures.attention import Output
from .balance import Places
from .part import Part


def attend(part: Part, at: Places) -> Output:
    """Return the context of the device's queries, and the weights if asked for.

    Args:
        part: the device's part of the call; its keys are all keys, gathered if they were cut.
        at: the queries that it serves.
    """
    if not at.is_balanced:
        return part.attend()
    part = at.exchanged(part)
    half = part.query.shape[1] // 2
    contexts = [part.rows(number * half, half, start).attend() for number, start in enumerate(at.starts())]
    return at.in_order(torch.cat(contexts, 1), 1)
