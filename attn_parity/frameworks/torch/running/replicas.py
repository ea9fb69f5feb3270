"""Read tensors that devices share: gather the shards, and compare the replicas.

Every rank must read the same values, or ranks would take different branches and deadlock: where replicas differ, all
take those of the first device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_attn.backend import to_numpy
from torch_attn.shards import is_sharded

from ....sides.shards import ShardCut, differing_copies

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Array = np.ndarray


def cut_of(tensor: Tensor) -> ShardCut:
    """Return how devices share a tensor."""
    axes: list[list[tuple[str, int]]] = [[] for _ in tensor.shape]
    if is_sharded(tensor):
        for number, placement in enumerate(tensor.placements):
            if placement.is_shard():
                axes[placement.dim % tensor.ndim].append((_axis_name(tensor, number), tensor.device_mesh.size(number)))
    return ShardCut(tuple(tuple(axis) for axis in axes))


def read(tensor: Tensor, what: str, mesh: DeviceMesh | None) -> tuple[Array, str]:
    """Return the whole tensor, and one line if its replicas differ ("" if not).

    Args:
        tensor: a DTensor, or a plain tensor: then each device of the mesh has one.
        what: its name in the line.
        mesh: the devices that share the weights; None for a single device.
    """
    if not is_sharded(tensor) and (mesh is None or tensor.is_meta):
        return to_numpy(tensor), ""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if not is_sharded(tensor):
            from torch.distributed.tensor import DTensor, Replicate

            assert mesh is not None
            tensor = DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        copies = [number for number, one in enumerate(tensor.placements) if one.is_replicate()]
        copies = [number for number in copies if tensor.device_mesh.size(number) > 1]
        whole = tensor.detach()
        if not copies or not tensor.numel():
            return to_numpy(whole), ""
        prints = _all_copies(whole, copies, _fingerprint)
        if all(np.array_equal(one, prints[0], equal_nan=True) for one in prints):
            return to_numpy(whole), ""
        replicas = _all_copies(whole, copies, lambda local: local)
    names = [_names(tensor, copies, number) for number in range(len(replicas))]
    apart = differing_copies(zip(names, replicas, strict=True))
    return replicas[0], f"{what}: {apart}" if apart else ""


def _fingerprint(local: Tensor) -> Tensor:
    """Return a few sums that two tensors have in common only if they are the same."""
    flat = local.to(torch.float64).reshape(-1)
    ramp = torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)
    return torch.stack([flat.sum(), (flat * flat).sum(), (flat * ramp).sum()])


def _all_copies(tensor: DTensor, copies: list[int], read_local: Callable[[Tensor], Tensor]) -> list[Array]:
    """Return the reading of each replica, gathered along the sharded axes."""
    from torch.distributed.tensor import DTensor, Shard

    local = read_local(tensor.to_local())
    is_print = local.shape != tensor.to_local().shape
    placements: list[object] = []
    for number, placement in enumerate(tensor.placements):
        if number in copies:
            placements.append(Shard(copies.index(number)))
        elif placement.is_shard() and not is_print:
            placements.append(Shard(placement.dim % tensor.ndim + len(copies)))
        else:  # prints of the parts follow each other
            placements.append(Shard(len(copies)) if is_print else placement)
    stacked = local.reshape(*[1] * len(copies), *local.shape)
    whole = to_numpy(DTensor.from_local(stacked, tensor.device_mesh, placements, run_check=False))
    return list(whole.reshape(-1, *whole.shape[len(copies) :]))


def _names(tensor: DTensor, copies: list[int], number: int) -> str:
    sizes = [tensor.device_mesh.size(one) for one in copies]
    places = np.unravel_index(number, sizes)
    return ", ".join(f"{_axis_name(tensor, one)}={int(at)}" for one, at in zip(copies, places, strict=True))


def _axis_name(tensor: DTensor, number: int) -> str:
    """Return the name of an axis of the tensor's mesh, or its number if the mesh has no names."""
    names = tensor.device_mesh.mesh_dim_names
    return names[number] if names else f"axis {number}"
