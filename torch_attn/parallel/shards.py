"""Tensors that devices share (`torch.distributed.tensor.DTensor`): put together, cut as another one is, and written.

torch.distributed is imported by whoever has such a tensor, never here: it takes a second.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from attn_bridge.weights import Region

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
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
        found: Tensor = tensor.detach().full_tensor()
    return found


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
    """Return a function of a tensor, element by element or along axes that are not cut, computed on each rank's part.

    Args:
        function: of `x` and what stands beside it; gives what is cut as `x` is.
        x: shared or not.
        *beside: tensors that every rank has, without gradients, which broadcast to all axes of `x` but the last.
    """
    if not is_sharded(x):
        return function(x, *beside)
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def part(tensor: Tensor) -> Tensor:
        tensor = tensor.reshape((1,) * (x.ndim - tensor.ndim) + tuple(tensor.shape))
        cuts = [one if isinstance(one, Shard) and tensor.shape[one.dim] > 1 else Replicate() for one in x.placements]
        return distribute_tensor(tensor, x.device_mesh, cuts, src_data_rank=None).to_local()

    found = function(x.to_local(), *map(part, beside))
    return DTensor.from_local(found.contiguous(), x.device_mesh, x.placements, run_check=False)


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def region_of(tensor: DTensor) -> Region | None:
    """Return which part of a shared tensor this rank holds; None where it is no box, or the rank holds none."""
    from torch.distributed.tensor import Replicate, Shard

    place = tensor.device_mesh.get_coordinate()
    if place is None or not all(type(one) in (Shard, Replicate) for one in tensor.placements):
        return None
    region = [(0, size) for size in tensor.shape]
    for axis, (at, placement) in enumerate(zip(place, tensor.placements, strict=True)):
        if isinstance(placement, Shard):  # as torch.chunk does it
            start, stop = region[placement.dim]
            size = -(-(stop - start) // tensor.device_mesh.size(axis))
            region[placement.dim] = min(start + at * size, stop), min(start + (at + 1) * size, stop)
    return tuple(region)


def from_part(part: Tensor, like: DTensor) -> DTensor:
    """Return the shared tensor of which this rank has that part, over the devices that share `like`, as they do."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=stride)


def write(target: DTensor, value: DTensor) -> None:
    """Give a shared tensor another one's numbers and dtype; it stays the same object."""
    if target.dtype == value.dtype:
        own_part(target).copy_(own_part(value))
        return
    target.grad = None
    target.data = value  # the dtype alone: what a DTensor holds are attributes of its own, which this leaves
    target._local_tensor, target._spec = value._local_tensor, value._spec


def _mesh_of(tensors: Iterable[Tensor]) -> DeviceMesh | None:
    """Return the largest mesh that shares one of the tensors, of which this rank is a part."""
    meshes = [one.device_mesh for one in tensors if is_sharded(one)]
    mine = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    return max(mine, key=lambda mesh: mesh.size(), default=None)


@contextlib.contextmanager
def together(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Leave the context when every rank of the tensors' mesh does, with an error on all where one has one."""
    mesh = _mesh_of(tensors)
    if mesh is None:
        yield
        return
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is: the others would wait for this rank
        own = error
    from torch import distributed

    found = [] if own is None else [(mesh.get_rank(), _portable(own))]
    for axis in range(mesh.ndim):
        lists: list[Any] = [None] * mesh.size(axis)
        distributed.all_gather_object(lists, found, group=mesh.get_group(axis))
        found = [pair for some in lists for pair in some]
    if own is not None:
        raise own
    if found:
        rank, theirs = found[0]
        theirs.add_note(f"raised by rank {rank}")
        raise theirs


def _portable(error: Exception) -> Exception:
    try:
        found = pickle.loads(pickle.dumps(error))
        return found if type(found) is type(error) else RuntimeError(str(error))
    except Exception:  # an error that can't travel says all the same what it is
        return RuntimeError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def gathering(tensors: Mapping[str, Tensor]) -> Iterator[Callable[[str], Tensor] | None]:
    """Yield on the first rank of a mesh what gives a whole tensor by name, one at a time; on the others None.

    Those have by then given away their parts, in the order in which the first rank asked for them.
    """
    mesh = _mesh_of(tensors.values())
    shared = [name for name, one in tensors.items() if is_sharded(one)]
    if mesh is None:
        yield lambda name: tensors[name]
        return
    if any(mesh.get_coordinate() or ()):
        while (number := _announced(mesh, tensors, -1)) >= 0:
            whole(tensors[shared[number]])
        yield None
        return

    def ask(name: str) -> Tensor:
        if name in shared:
            _announced(mesh, tensors, shared.index(name))
        return whole(tensors[name])

    try:
        yield ask
    finally:
        _announced(mesh, tensors, -1)


def _announced(mesh: DeviceMesh, tensors: Mapping[str, Tensor], number: int) -> int:
    """Return the number that the first rank of a mesh says: it tells those of its first axis, they their next, ..."""
    from torch import distributed

    device = next(own_part(one).device for one in tensors.values() if is_sharded(one))
    said, place = torch.tensor(number, device=device), mesh.get_coordinate() or []
    for axis in range(mesh.ndim):
        if not any(place[axis + 1 :]):
            distributed.broadcast(said, group=mesh.get_group(axis), group_src=0)
    return int(said)
