"""Arrays of other libraries as tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def as_tensor(array: object) -> Tensor:
    """Return an array as a tensor; one of another library is on the CPU, whatever the default device."""
    return array if isinstance(array, Tensor) else torch.as_tensor(array, device="cpu")
