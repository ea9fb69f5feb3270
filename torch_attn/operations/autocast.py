"""Sums over all tokens or streams, and choices by scores, under `torch.autocast`: products keep their precision."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def without_autocast(array: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return the context in which products are not cast to a lower precision, on the device of an array."""
    kind = array.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # the meta device has none
    return torch.autocast(kind, enabled=False) if is_cast else contextlib.nullcontext()
