"""Tensors that devices share (`torch.distributed.tensor.DTensor`): gather them, and cut a tensor like another.

This module imports torch.distributed only inside functions that need it: the import takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is one that devices share."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; every rank of its mesh has to ask for it where it is shared."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad(), torch._C.DisableTorchFunction():  # modes that are entered are not for what is moved here
        whole_array: Tensor = tensor.detach().full_tensor()
    return whole_array


def cut_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has, over the devices that share `like`; else it itself.

    Where these hold parts of a sum, each gets all of it.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = [Replicate() if one.is_partial() else one for one in like.placements]
    return distribute_tensor(tensor, like.device_mesh, placements, src_data_rank=None)


def beside(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has as one that is whole on all of them, where they share `like`."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def on_parts(function: Callable[..., Tensor], x: Tensor, *beside: Tensor) -> Tensor:
    """Apply a function to each rank's part of a tensor, element by element or along axes that are not cut.

    Args:
        function: of `x` and `beside`; its result is cut as `x` is.
        x: shared or not.
        *beside: tensors of every rank, without gradients, which broadcast to all axes of `x` but the last.
    """
    if not is_sharded(x):
        return function(x, *beside)
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def part(tensor: Tensor) -> Tensor:
        tensor = tensor.reshape((1,) * (x.ndim - tensor.ndim) + tuple(tensor.shape))
        cuts = [one if isinstance(one, Shard) and tensor.shape[one.dim] > 1 else Replicate() for one in x.placements]
        return distribute_tensor(tensor, x.device_mesh, cuts, src_data_rank=None).to_local()

    result = function(x.to_local(), *map(part, beside))
    return DTensor.from_local(result.contiguous(), x.device_mesh, x.placements, run_check=False)
