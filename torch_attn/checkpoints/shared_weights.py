"""Weights that devices share: the part of each rank, and the steps that all ranks have to take together.

This module does not import torch.distributed, which takes a second; its callers with a shared tensor have done so.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from attn_bridge.weights import Region, overlap, slices

from ..shards import is_sharded, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Value = TypeVar("Value")


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def region_of(tensor: DTensor) -> Region | None:
    """Return this rank's region of a shared tensor; None if it is not a box, or the rank holds none."""
    return _region_at(tensor, tensor.device_mesh.get_coordinate())


def _region_at(tensor: DTensor, coordinate: Sequence[int] | None) -> Region | None:
    """Return the region of a shared tensor at a coordinate of its mesh; None if it is not a box, or off the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    if coordinate is None or not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return None
    region = [(0, size) for size in tensor.shape]
    for axis, (at, placement) in enumerate(zip(coordinate, tensor.placements, strict=True)):
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
    portable = _everywhere(mesh, [] if own is None else [(mesh.get_rank(), _portable(own))])
    if own is not None:
        raise own
    if portable:
        rank, theirs = portable[0]
        theirs.add_note(f"raised by rank {rank}")
        raise theirs


def gathered(tensors: Iterable[Tensor], value: Value) -> list[Value]:
    """Gather a value from every rank of the tensors' mesh, on all of them."""
    mesh = _mesh_of(tensors)
    return [value] if mesh is None else _everywhere(mesh, [value])


def rank_of(tensors: Iterable[Tensor]) -> int | None:
    """Return this process's rank, or None where none of the tensors is shared with others."""
    mesh = _mesh_of(tensors)
    return None if mesh is None else int(mesh.get_rank())


def _everywhere(mesh: DeviceMesh, values: list[Value]) -> list[Value]:
    """Return the lists of all ranks as one, on all of them: along each axis of the mesh in turn."""
    from torch import distributed

    for axis in range(mesh.ndim):
        lists: list[list[Value]] = [[]] * mesh.size(axis)
        distributed.all_gather_object(lists, values, group=mesh.get_group(axis))
        values = [value for values_of_rank in lists for value in values_of_rank]
    return values


def _portable(error: Exception) -> Exception:
    try:
        copy_of_error = pickle.loads(pickle.dumps(error))
        return copy_of_error if type(copy_of_error) is type(error) else RuntimeError(str(error))
    except Exception:  # an error that can't travel says all the same what it is
        return RuntimeError(f"{type(error).__name__}: {error}")


Ask = Callable[[str, Region], Tensor]
"""Gives a region of a tensor by name, in memory of the host or of this rank's device."""


@contextlib.contextmanager
def gathering(tensors: Mapping[str, Tensor]) -> Iterator[Ask | None]:
    """Yield a function that returns a region of a tensor by name on the first rank of a mesh, and None on the others.

    By the time the others enter the context, they have sent their parts of each region in the order of the first rank's
    requests; of ranks with the same part, one sends. A tensor whose parts are not boxes is assembled whole.
    """
    mesh = _mesh_of(tensors.values())
    shared = [name for name, one in tensors.items() if is_sharded(one)]
    if mesh is None:
        yield lambda name, region: tensors[name][slices(region)]
        return
    most = max(tensors[name].ndim for name in shared)
    if any(mesh.get_coordinate() or ()):
        while (numbers := _announced(mesh, tensors, [-1] + [0] * 2 * most))[0] >= 0:
            tensor = tensors[shared[numbers[0]]]
            bounds = numbers[1 : 1 + 2 * tensor.ndim]
            _sent(mesh, tensor, tuple(zip(bounds[::2], bounds[1::2], strict=True)))
        yield None
        return

    def ask(name: str, region: Region) -> Tensor:
        if name not in shared:
            return tensors[name][slices(region)]
        bounds = [at for pair in region for at in pair]
        _announced(mesh, tensors, [shared.index(name), *bounds, *[0] * (2 * most - len(bounds))])
        return _sent(mesh, tensors[name], region)

    try:
        yield ask
    finally:
        _announced(mesh, tensors, [-1] + [0] * 2 * most)


def _sent(mesh: DeviceMesh, tensor: Tensor, region: Region) -> Tensor:
    """Send this rank's part of a region to the first rank of a mesh, which assembles it."""
    from torch import distributed

    assert is_sharded(tensor)
    first, mine = int(mesh.mesh.flatten()[0]), mesh.get_rank()
    ranks = tensor.device_mesh.mesh
    regions = {coordinate: _region_at(tensor, coordinate) for coordinate in itertools.product(*map(range, ranks.shape))}
    if None in regions.values():
        return whole(tensor)[slices(region)]
    own_values = own_part(tensor).detach()
    result = torch.empty([stop - start for start, stop in region] if mine == first else 0, dtype=own_values.dtype)
    result = result.to(own_values.device)
    seen = set()
    for coordinate, own in regions.items():
        common = None if own is None or own in seen else overlap(own, region)
        seen.add(own)
        if own is None or common is None:
            continue
        owner = int(ranks[coordinate])
        in_own, in_region = (
            slices(tuple((a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))) for box in (own, region)
        )
        if owner == mine:
            part = own_values[in_own].contiguous()
            if mine == first:
                result[in_region] = part
            else:
                distributed.send(_flat(part), first)
        elif mine == first:
            part = torch.empty(
                [stop - start for start, stop in common], dtype=own_values.dtype, device=own_values.device
            )
            distributed.recv(_flat(part), owner)
            result[in_region] = part
    return result


def _flat(part: Tensor) -> Tensor:
    """Return the bytes of a part, in the same memory."""
    return part.reshape(-1).view(torch.uint8)


def _announced(mesh: DeviceMesh, tensors: Mapping[str, Tensor], numbers: list[int]) -> list[int]:
    """Broadcast numbers from the first rank of a mesh and return them: along the first axis, then the next, ..."""
    from torch import distributed

    device = next(own_part(tensor).device for tensor in tensors.values() if is_sharded(tensor))
    values, coordinate = torch.tensor(numbers, device=device), mesh.get_coordinate() or []
    for axis in range(mesh.ndim):
        if not any(coordinate[axis + 1 :]):
            distributed.broadcast(values, group=mesh.get_group(axis), group_src=0)
    return [int(value) for value in values.tolist()]
