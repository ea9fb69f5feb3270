"""Products of vectors with a matrix that devices share: each multiplies its part, without a search for placements.

DTensor searches for the cheapest way to move both operands, which takes minutes on meshes of three axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from attn_bridge.sharding.plan import Role

from ...shards import is_sharded
from ..classes import cut_of
from ..devices import Devices

PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


class Products(TorchFunctionMode):
    """Context in which ``x @ matrix`` is computed by `product` where devices share both."""

    def __init__(self, sharding: Devices):
        super().__init__()
        self.sharding = sharding

    def __torch_function__(
        self, function: Callable[..., object], types: object, arguments: Any = (), options: Any = None
    ) -> object:
        """Call a function of torch."""
        if function in PRODUCTS and len(arguments) == 2 and not options:
            x, matrix = arguments
            if is_sharded(x) and is_sharded(matrix) and matrix.ndim == 2 and x.ndim >= 2:
                return product(self.sharding, x, matrix)
        return function(*arguments, **(options or {}))


def product(sharding: Devices, x: DTensor, matrix: DTensor, bias: Tensor | None = None) -> DTensor:
    """Return ``x @ matrix + bias``, for the device's columns or rows of the matrix; rows are summed, once.

    Args:
        sharding: the devices.
        x: ``(..., i)``, cut by tokens or sequences, not by channels.
        matrix: ``(i, o)``; what fsdp cuts is put together.
        bias: ``(o,)``, cut as the columns are.
    """
    cut, last, axis = cut_of(sharding, x), x.ndim - 1, sharding.axis("tensor")
    cut = {role: None if number == last else number for role, number in cut.items()}
    placement = None if axis is None else matrix.placements[axis]
    by = placement.dim if isinstance(placement, Shard) else None
    cut["tensor"] = last if by == 0 else None
    working: list[Role] = [role for role, number in cut.items() if number is not None]
    if by == 1:
        working.append("tensor")
    products = sharding.local(x, cut, working) @ sharding.local(matrix, {"tensor": by}, working)
    if bias is not None:
        part = sharding.local(bias, {"tensor": None if by != 1 else 0}, working)
        # A sum over devices adds it once.
        products = products + (part * float(sharding.rank("tensor") == 0) if by == 0 else part)
    cut["tensor"] = last if by == 1 else None
    return sharding.joined(products, cut, ["tensor"] if by == 0 else [])
